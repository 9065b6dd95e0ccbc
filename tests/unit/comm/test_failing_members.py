"""A member that ends, leaves or freezes is named by the others, in time."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from echelon.comm import Collective, Group
from echelon.comm import group as group_module
from echelon.core.errors import PeerError
from tests.cluster.shared import Counters

from .processes import run, traces

pytestmark = pytest.mark.timeout(120)

SOON = 10.0
"""Seconds on a busy machine; who does not notice waits three times as long."""

Act = Callable[[], None]


@pytest.fixture(autouse=True)
def _short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever serves the store would stay a second for a member that never says goodbye."""
    monkeypatch.setattr(group_module, "_LINGER", 0.1)


def leave_hard() -> None:
    os._exit(3)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def meet(collective: Collective) -> Callable[[], object]:
    return collective.barrier


def add(collective: Collective) -> Callable[[], object]:
    return lambda: collective.sum([1.0])


def add_tensors(collective: Collective) -> Callable[[], object]:
    return lambda: collective.sum_(torch.zeros(10))


def spread(collective: Collective) -> Callable[[], object]:
    return lambda: collective.broadcast_([torch.zeros(10)])


def few_gradients(collective: Collective) -> Callable[[], object]:
    return gradients(collective, 10)


def many_gradients(collective: Collective) -> Callable[[], object]:
    return gradients(collective, 100_000)


def gradients(collective: Collective, size: int) -> Callable[[], object]:
    sums = collective.gradients([torch.zeros(size)])

    def update() -> None:
        sums.begin([1.0])
        sums.put_all([torch.ones(size)])
        sums.finish()

    return update


def failing(act: Act, does: Callable[[Collective], Callable[[], object]], who: int) -> Any:
    """A body in which member `who` acts after three rounds; the others tell what they saw."""

    def body(group: Group) -> Any:
        collective = group.collective()
        pids = collective.sum([float(os.getpid()) if group.index == who else 0.0])
        call = does(collective)
        for _ in range(3):
            call()
        if group.index == who:
            act()
        start = time.monotonic()
        with pytest.raises(PeerError) as caught:
            call()
        took = time.monotonic() - start
        with pytest.raises(PeerError) as again:
            call()
        return [str(caught.value), took, str(again.value), int(pids[0])]

    return body


@pytest.mark.parametrize(
    ("act", "does"),
    [(be_killed, d) for d in (meet, add, add_tensors, spread, few_gradients, many_gradients)]
    + [(leave_hard, d) for d in (meet, many_gradients)],
)
@pytest.mark.parametrize("who", [0, 2])
def test_a_member_that_ends_is_named_at_once(
    act: Act, does: Callable[[Collective], Callable[[], object]], who: int
) -> None:
    answers = run(3, failing(act, does, who), may_die=[who])
    for index, answer in enumerate(answers):
        if index != who:
            message, took, again, pid = answer
            assert message.startswith(f"member {who} (pid {pid}) ended; "), message
            assert "awaited" in message
            assert took < SOON
            assert again == message


def test_what_was_awaited_is_said() -> None:
    answers = run(2, failing(be_killed, many_gradients, 0), may_die=[0])
    assert answers[1][0].endswith("ended; its gradients of update 4 were awaited")


@pytest.mark.parametrize("does", [meet, few_gradients, many_gradients])
def test_a_frozen_member_is_named_at_the_deadline(
    does: Callable[[Collective], Callable[[], object]],
) -> None:
    answers = run(3, failing(freeze, does, 1), may_die=[1], patience=1.0)
    for index in (0, 2):
        message, took, again, pid = answers[index]
        assert message.startswith(f"member 1 (pid {pid}) "), message
        # One may hear from the other, who gave up a moment earlier.
        assert "did not come within 1 s; " in message
        told = re.search(r", as member [02] \(pid \d+\) found$", message)
        assert (0.0 if told else 1.0) <= took < SOON
        assert again == message


def test_a_member_that_closed_is_not_waited_for() -> None:
    def body(group: Group) -> Any:
        collective = group.collective()
        collective.barrier()
        if group.index == 1:
            collective.close()
            time.sleep(0.6)  # it lives on, elsewhere
            with pytest.raises(PeerError, match="this member has left its collective"):
                collective.barrier()
            return None
        start = time.monotonic()
        with pytest.raises(PeerError, match=r"member 1 \(pid \d+\) left; it was awaited"):
            collective.barrier()
        return time.monotonic() - start

    assert run(2, body)[0] < SOON


def test_the_first_member_waits_for_readers_of_its_results_and_notices_if_one_ends() -> None:
    whole = Counters(1)

    def body(group: Group) -> Any:
        collective = group.collective()
        sums = collective.gradients([torch.zeros(100_000)])
        sums.begin([1.0])
        sums.put_all([torch.ones(100_000)])
        sums.finish()
        if group.index == 1:
            time.sleep(0.2)
            whole[0] = int((sums.results[0] == 1).all())
            os._exit(3)
        sums.begin([1.0])
        start = time.monotonic()
        with pytest.raises(
            PeerError, match=r"member 1 \(pid \d+\) ended; it was awaited to be done with update 1"
        ):
            sums.put(0, torch.full((100_000,), 5.0))
        return time.monotonic() - start

    assert run(2, body, may_die=[1])[0] < SOON
    assert whole[0] == 1, "written over while it was read"


@pytest.mark.parametrize("does", [meet, add_tensors, many_gradients])
@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_a_member_that_ends_is_noticed_from_other_hosts(
    does: Callable[[Collective], Callable[[], object]], hosts: str
) -> None:
    who = len(hosts) - 1
    answers = run(len(hosts), failing(be_killed, does, who), hosts=hosts, may_die=[who])
    message, took, again, pid = answers[0]
    assert f"member {who} (pid {pid}) is gone or did not come" in message
    assert took < SOON
    assert again == message
    for other in answers[1:who]:  # shares the first one's host, and is told
        assert re.fullmatch(re.escape(message) + r", as member 0 \(pid \d+\) found", other[0])
        assert other[1] < 2 * SOON


def test_a_frozen_host_is_noticed_at_the_deadline() -> None:
    answers = run(2, failing(freeze, meet, 1), hosts="ab", may_die=[1], patience=1.0)
    message, took, _, pid = answers[0]
    assert f"member 1 (pid {pid}) is gone or did not come within 1 s" in message
    assert 0.8 < took < SOON


def test_a_member_of_this_host_that_ends_is_named_through_torch_too() -> None:
    body = failing(be_killed, many_gradients, 2)
    message, took, again, pid = run(3, body, may_die=[2], machines=["aarch64"] * 3)[0]
    assert message.startswith(f"member 2 (pid {pid}) ended; "), message
    assert took < SOON
    assert again == message


def test_a_member_that_ends_before_all_are_connected_is_named() -> None:
    def body(group: Group) -> Any:
        if group.index == 1:
            os._exit(3)
        with pytest.raises(PeerError, match=r"member 1 \(pid \d+\) ended before all were"):
            group.collective()
        return True

    assert run(2, body, may_die=[1], machines=["aarch64"] * 2)[0]


def test_closing_does_not_wait_for_sums_that_others_never_begin() -> None:
    """torch would: until the deadline, which here is longer than a member may take."""

    def body(group: Group) -> Any:
        collective = group.collective()
        sums = collective.gradients([torch.zeros(10)])
        collective.barrier()
        if group.index == 0:
            sums.begin([1.0])
            sums.put(0, torch.ones(10))
            group.close()
            return True
        with pytest.raises(PeerError, match="member 0"):
            collective.barrier()
        return True

    assert run(2, body, hosts="ab", patience=200.0) == [True, True]


def test_a_sum_that_could_not_be_made_leaves_no_way_to_other_hosts_open() -> None:
    def body(group: Group) -> Any:
        collective = group.collective()
        collective.barrier()
        if group.index == 1:
            os._exit(3)
        if group.index == 2:
            sums = collective.gradients([torch.zeros(10)])
            sums.begin([1.0])
            with pytest.raises(PeerError, match="member 0"):
                sums.finish()
            return 0
        with pytest.raises(PeerError, match="member 1"):
            collective.gradients([torch.zeros(10)])
        group.close()
        return traces()["threads"]

    assert run(3, body, hosts="aab", may_die=[1]) == [1, None, 0]
