"""The gate, one decision at a time."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from echelon.comm.ps.messages import PushHead
from echelon.core.errors import PeerError, TrainingError
from echelon.core.types import Ask, Lease
from echelon.data.ledger import Ledger
from echelon.server.decisions import Answer, Decision, Push, Round
from echelon.server.gate import Gate

TOGETHER: dict[str, Any] = {"staleness": 0, "quorum": "all"}
EACH: dict[str, Any] = {"staleness": None, "quorum": 1}


class Table:
    """A gate, and pushes that are quickly written down."""

    def __init__(self, rules: dict[str, Any], members: int = 2, **more: Any) -> None:
        self.gate = Gate({"samples": 1000, "batch": 10} | rules | more, parameters=3)
        self.gate.enter(0.0, 1, range(members))
        self._seq = 0
        self._at = 0

    def push(
        self,
        member: int,
        based_on: int | None = None,
        lease: tuple[int, int] | None = None,
        *,
        seq: int | None = None,
        now: float = 0.0,
        asked: int = 0,
        weight: float | None = None,
        missing: tuple[int, ...] = (),
        generation: int = 1,
        **head: Any,
    ) -> list[Decision]:
        self._seq += 1
        start, stop = lease or (self._at, self._at + 10)
        self._at = max(self._at, stop)
        size = float(stop - start) if weight is None else weight
        base = self.gate.version if based_on is None else based_on
        row = (size, size, 2 * size, float(asked), 0.5)
        given = {"generation": generation, "lease": Lease(0, start, stop), "based_on": base}
        made = PushHead(**{**given, "row": row, **head})
        push = Push(seq or self._seq, made, frozenset(missing))
        return self.gate.push(now, member, push)

    def begin(self, *members: int) -> None:
        for member in members:
            self.gate.pull(0.0, member)


def rounds(decisions: list[Decision]) -> list[Round]:
    return [decision for decision in decisions if isinstance(decision, Round)]


def answers(decisions: list[Decision]) -> dict[int, str]:
    return {d.member: d.outcome.kind for d in decisions if isinstance(d, Answer)}


def answer(decisions: list[Decision], member: int) -> Any:
    found = [d for d in decisions if isinstance(d, Answer) and d.member == member]
    assert len(found) == 1, decisions
    return found[0].outcome


def test_together_all_pushes_make_one_version() -> None:
    table = Table(TOGETHER)
    assert table.push(0, asked=Ask.SIGNAL) == []
    decisions = table.push(1, lease=(10, 16), asked=Ask.SIGNAL)
    (made,) = rounds(decisions)
    assert (made.version, made.divisor, made.scale) == (1, 16.0, 1 / 16)
    assert made.pushes == ((0, 1), (1, 2))
    for member in (0, 1):
        outcome = answer(decisions, member)
        assert (outcome.kind, outcome.version, outcome.weights) == ("applied", 1, True)
        assert outcome.row == (16.0, 16.0, 32.0, 2.0 * Ask.SIGNAL, 1.0)
        assert (outcome.asked, outcome.share) == (0, 0.0)


def test_together_one_that_is_not_finite_is_refused_for_all() -> None:
    table = Table(TOGETHER)
    table.push(0, finite=False)
    decisions = table.push(1)
    assert answers(decisions) == {0: "refused", 1: "refused"}
    assert answer(decisions, 1).reason == "the gradient of member 0 is not finite"
    assert table.gate.version == 0
    assert not table.gate.records(0)
    table.push(0, lease=(0, 10))
    assert table.push(1, lease=(10, 20))
    assert table.gate.version == 1


def test_a_loss_that_is_not_finite_is_refused() -> None:
    table = Table(EACH, 1)
    row = (1.0, 1.0, math.inf, 0.0, 0.0)
    assert answers(table.push(0, row=row)) == {0: "refused"}


def test_an_empty_part_takes_part() -> None:
    table = Table(TOGETHER)
    table.push(0, lease=(0, 7))
    (made,) = rounds(table.push(1, lease=(7, 7), missing=(0, 1, 2)))
    assert made.divisor == 7
    assert made.missing == frozenset()
    again = table.push(1, seq=2, based_on=0, lease=(7, 7))
    assert answers(again) == {1: "done"}


def test_weight_0_and_no_gradient_at_all_are_refused() -> None:
    table = Table(TOGETHER)
    table.push(0, weight=0.0)
    assert "weight of 0" in answer(table.push(1, weight=0.0), 0).reason
    table.push(0, missing=(0, 1, 2))
    assert answer(table.push(1, missing=(0, 1, 2)), 0).reason == "no parameter got a gradient"
    table.push(0, missing=(0, 1))
    (made,) = rounds(table.push(1, missing=(1, 2)))
    assert made.missing == {1}


def test_a_push_that_is_sent_again_changes_nothing() -> None:
    table = Table(EACH, 1)
    table.push(0, lease=(0, 10), seq=7)
    again = table.push(0, lease=(0, 10), seq=7)
    assert answers(again) == {0: "done"}
    assert answer(again, 0).version == 1
    assert answers(table.push(0, lease=(2, 9), seq=8)) == {0: "done"}
    assert table.gate.version == 1
    assert [tuple(record) for record in table.gate.records(0)] == [(0, 0, 10, 1, 0)]


def test_samples_that_are_applied_in_part_go_back() -> None:
    table = Table(EACH, 2)
    table.push(0, lease=(5, 15))
    outcome = answer(table.push(1, lease=(10, 30)), 1)
    assert outcome.kind == "late"
    assert outcome.reason == "of samples [10, 30) of epoch 0, [10, 15) are applied already"


def test_samples_that_wait_to_be_applied_do_not_count_twice() -> None:
    table = Table({"staleness": 0, "quorum": 3}, 3)
    assert table.push(0, lease=(0, 10)) == []
    outcome = answer(table.push(1, lease=(9, 12)), 1)
    assert outcome.kind == "late"
    assert "of member 0 are about to be applied" in outcome.reason


def test_another_generation_and_strangers_are_void() -> None:
    table = Table(EACH, 2)
    assert answers(table.push(5)) == {5: "void"}
    table.gate.enter(0.0, 2, [0])
    assert answers(table.push(0, generation=1)) == {0: "void"}
    outcome = answer(table.push(1, generation=2), 1)
    assert outcome.reason == "member 1 is none of generation 2"
    assert not outcome.weights
    with pytest.raises(TrainingError, match="generation 1 is over: this is generation 2"):
        table.gate.enter(0.0, 1, [0, 1])
    assert table.gate.enter(0.0, 2, [0]) == []


def test_what_waits_is_void_when_a_generation_begins() -> None:
    table = Table(TOGETHER)
    table.push(0)
    decisions = table.gate.enter(0.0, 2, [0, 1])
    assert answers(decisions) == {0: "void"}
    assert rounds(table.push(1, generation=2)) == []
    assert len(rounds(table.push(0, generation=2))) == 1


def test_what_is_applied_is_told_when_a_generation_begins() -> None:
    table = Table({"staleness": 0, "quorum": 1}, 2)
    table.begin(0, 1)
    table.push(0)  # 1 is given weights now, 0 waits for them
    outcome = answer(table.gate.enter(0.0, 2, [0, 1]), 0)
    assert (outcome.kind, outcome.version, outcome.weights) == ("applied", 1, False)


@pytest.mark.parametrize(
    "head",
    [
        {"based_on": 3},
        {"row": (1.0, 2.0)},
        {"row": (1.0, 1.0, 1.0, -5.0, 1.0)},
        {"row": (1.0, 1.0, 1.0, math.nan, 1.0)},
        {"lease": Lease(0, 990, 1001)},
        {"lease": Lease(0, 20, 10)},
        {"lease": Lease(-1, 0, 10)},
    ],
    ids=str,
)
def test_a_push_that_makes_no_sense_is_void(head: dict[str, Any]) -> None:
    gate = Gate({"samples": 1000, **EACH})
    gate.enter(0.0, 1, [0])
    given = {
        "generation": 1,
        "lease": Lease(0, 0, 10),
        "based_on": 0,
        "row": (1.0, 1.0, 1.0, 0.0, 1.0),
    }
    made = Push(1, PushHead(**{**given, **head}))
    assert answers(gate.push(0.0, 0, made)) == {0: "void"}
    assert gate.version == 0


def test_a_quorum_does_not_wait_and_what_comes_later_is_late() -> None:
    table = Table({"staleness": 0, "quorum": 2}, 3)
    table.begin(0, 1, 2)
    assert table.push(0, 0) == []
    decisions = table.push(1, 0)
    assert answers(decisions) == {0: "applied", 1: "applied"}
    assert answer(decisions, 0).share == 5.0
    outcome = answer(table.push(2, 0), 2)
    assert (outcome.kind, outcome.version, outcome.staleness) == ("late", 1, 1)
    assert outcome.reason == "1 updates were made since version 0"
    assert outcome.weights


def test_a_quorum_makes_do_when_nobody_else_is_at_work() -> None:
    table = Table({"staleness": 0, "quorum": 3}, 3)
    table.begin(0, 1)
    table.push(0, 0)
    assert table.gate.rest(0.0, 1) == [], "2 has not begun yet, but will"
    table.begin(2)
    decisions = table.gate.left(0.0, 2)
    assert [made.pushes for made in rounds(decisions)] == [((0, 1),)]


def test_a_quorum_does_not_wait_for_one_that_found_nothing_to_do_after_a_meeting() -> None:
    table = Table({"staleness": 0, "quorum": 2}, 2)
    table.begin(0, 1)
    for member in (0, 1):
        table.gate.pull(0.0, member, begin=False)
    table.gate.rest(0.0, 1)  # before the other ends the meeting
    table.begin(0)
    assert [made.pushes for made in rounds(table.push(0, 0))] == [((0, 1),)]


def test_one_after_the_other() -> None:
    table = Table({"staleness": 0, "quorum": 1}, 2)
    assert answers(table.gate.pull(0.0, 0)) == {0: "pulled"}
    assert table.gate.pull(0.0, 1) == []
    decisions = table.push(0, 0)
    assert len(rounds(decisions)) == 1
    assert answers(decisions) == {1: "pulled"}, "0 has to wait for 1 now"
    assert answers(table.gate.left(0.0, 1)) == {0: "applied"}


def test_a_push_waits_for_an_older_one() -> None:
    table = Table({"staleness": 1, "quorum": 1}, 2)
    table.begin(0, 1)
    assert len(rounds(table.push(0, 0))) == 1  # 1 is at 0, the version 1
    assert table.push(0, 1) == [], "1 would be two versions behind"
    decisions = table.push(1, 0)
    assert [made.version for made in rounds(decisions)] == [2, 3]
    assert [made.pushes[0][0] for made in rounds(decisions)] == [1, 0]


def test_one_that_comes_back_is_late_where_others_took_its_place() -> None:
    table = Table({"staleness": 1, "quorum": 1}, 3)
    table.begin(0, 1)
    table.gate.left(0.0, 0)
    table.begin(2)
    table.push(1, 0)  # version 1; 2 is at 0, 1 at 1
    assert table.push(0, 0) == [], "it gets no weights as long as two others have some"
    decisions = table.push(2, 0)
    assert len(rounds(decisions)) == 1
    assert answers(decisions) == {0: "late"}


def test_asking_reaches_everybody_once() -> None:
    table = Table(EACH, 3)
    table.begin(0, 1, 2)
    assert answer(table.push(0, asked=Ask.REGROUP), 0).asked == Ask.REGROUP
    assert answer(table.push(1), 1).asked == Ask.REGROUP
    assert answer(table.gate.pull(0.0, 0, begin=False), 0).asked == Ask.REGROUP
    # Nobody ends the meeting by beginning anew while 2 is still at work.
    table.begin(0)
    assert answer(table.push(0), 0).asked == Ask.REGROUP
    assert answer(table.push(2), 2).asked == Ask.REGROUP
    table.begin(0, 1, 2)
    assert all(answer(table.push(member), member).asked == 0 for member in (0, 1, 2))


def test_one_that_was_not_told_is_told_after_the_meeting() -> None:
    table = Table(EACH, 2)
    table.begin(0, 1)
    table.gate.rest(0.0, 1)
    assert answer(table.push(0, asked=Ask.SIGNAL), 0).asked == Ask.SIGNAL
    table.begin(1)  # it got a lease meanwhile, and knows of nothing
    assert answer(table.push(1), 1).asked == Ask.SIGNAL


def test_all_meet_where_something_is_due_and_at_the_end() -> None:
    table = Table(EACH, 1, due=[2, 5], steps=7)
    table.begin(0)
    asked = []
    for _ in range(7):
        outcome = answer(table.push(0), 0)
        asked.append(outcome.asked)
        if outcome.asked:
            table.begin(0)
    assert asked == [0, Ask.MEET, 0, Ask.MEET, Ask.MEET, Ask.MEET, Ask.MEET]
    over = answer(table.push(0), 0)
    assert (over.kind, over.version, over.asked) == ("late", 7, Ask.MEET)
    assert over.reason == "all steps are done"


def test_speeds_do_not_call_for_a_meeting_apart() -> None:
    table = Table(EACH, 1)
    assert answer(table.push(0, asked=Ask.BALANCE), 0).asked == 0


def test_rows_are_summed_up_until_a_trainer_hears_of_them() -> None:
    table = Table(EACH, 2)
    table.push(0)
    table.push(0, lease=(10, 14))
    assert answer(table.gate.pull(0.0, 1), 1).row == ()
    outcome = answer(table.push(1, lease=(14, 15), asked=Ask.TIME), 1)
    assert outcome.row == (15.0, 15.0, 30.0, 0.0, 1.5)
    assert answer(table.push(1, lease=(15, 17)), 1).row[1] == 2.0


def test_the_rate_follows_the_schedule() -> None:
    schedule = {"name": "plateau", "warmup": 2, "patience": 1, "factor": 0.5}
    table = Table(EACH, 1, schedule=schedule)
    factors = [rounds(table.push(0))[0].factor for _ in range(3)]
    assert factors == [0.5, 1.0, 1.0]
    for _ in range(2):  # each trainer says it
        table.gate.observe({"level": 0.5, "best": 1.0, "waited": 0})
    assert rounds(table.push(0))[0].factor == 0.5


@pytest.mark.parametrize("staleness", [3, None])
def test_a_push_counts_by_its_size_and_a_stale_one_for_less(staleness: int | None) -> None:
    table = Table({"staleness": staleness, "quorum": 1}, 2, scale="staleness")
    table.begin(0, 1)
    assert rounds(table.push(0, 0, lease=(0, 5)))[0].factor == 0.5
    assert rounds(table.push(1, 0, lease=(5, 25)))[0].factor == 2.0 / 2
    even = Table({"staleness": staleness, "quorum": 1, "balance": False}, 2)
    even.begin(0, 1)
    assert rounds(even.push(0, 0, lease=(0, 5)))[0].factor == 1.0


def test_the_smaller_last_batch_of_one_alone_is_a_whole_step() -> None:
    table = Table(EACH, 1)
    table.begin(0)
    assert rounds(table.push(0, 0, lease=(0, 5)))[0].factor == 1.0


@pytest.mark.parametrize("staleness", [3, None])
def test_shares_follow_speeds(staleness: int | None) -> None:
    table = Table({"staleness": staleness, "quorum": 1}, 2)
    table.begin(0, 1)
    now = 0.0
    for _ in range(4):
        table.push(0, now=now + 1.0)
        now += 3.0
        table.push(1, now=now)
        for member in (0, 1):
            table.gate.pull(now, member)
    shares = [answer(table.gate.pull(now, member), member).share for member in (0, 1)]
    assert shares == [15.0, 5.0]


def test_clipping_by_norm() -> None:
    table = Table(EACH, 1, clip={"norm": 2.0})
    (made,) = rounds(table.push(0, square=16.0 * 100))  # the norm of the mean is 4
    assert not made.measured
    assert made.scale == pytest.approx(0.05)
    (small,) = rounds(table.push(0, square=1.0))
    assert small.scale == 0.1
    both = Table(TOGETHER, 2, clip={"norm": 2.0})
    both.push(0)
    (made,) = rounds(both.push(1))
    assert made.measured
    assert made.scale_of(64.0 * 400) == pytest.approx(0.25 / 20)
    (value,) = rounds(Table(EACH, 1, clip={"value": 0.5}).push(0))
    assert (value.limit, value.measured) == (0.5, False)


def test_stale_pushes_are_compensated() -> None:
    table = Table({"staleness": None, "quorum": 2}, 3, compensate=0.5)
    table.push(0, 0)
    assert rounds(table.push(1, 0))[0].strengths == ()
    table.push(0, 0, lease=(100, 130))
    (made,) = rounds(table.push(2, 1, lease=(130, 140)))
    assert made.strengths == pytest.approx((0.5 * 40 / 30, 0.0))


def test_records_are_kept_until_they_are_on_record() -> None:
    table = Table(EACH, 2)
    for member in (0, 1, 0):
        table.push(member)
    assert [(r.version, r.member) for r in table.gate.records(1)] == [(2, 1), (3, 0)]
    table.gate.recorded(2)
    assert [r.version for r in table.gate.records(0)] == [3]


def test_samples_that_are_left_out_are_told_until_another_version_is_on_record() -> None:
    table = Table(EACH, 2)
    table.push(0)
    assert len(table.gate.records(0)) == 1
    table.gate.recorded(1)
    table.gate.leave_out(1, Lease(0, 900, 910))  # version 1 is on record already
    table.gate.leave_out(1, Lease(0, 900, 910))
    assert [tuple(record) for record in table.gate.records(1)] == [(0, 900, 910, 1, -2)]
    assert answers(table.push(0, lease=(900, 910))) == {0: "done"}
    table.push(0, lease=(20, 30))
    assert [record.version for record in table.gate.records(1)] == [1, 2]
    state = table.gate.state_dict()
    other = Table(EACH, 2)
    other.gate.load_state_dict(state)
    assert other.gate.state_dict() == state
    table.gate.recorded(2)
    assert table.gate.records(2) == []


def test_together_few_records_are_kept() -> None:
    table = Table(TOGETHER, 1)
    for _ in range(80):
        table.push(0)
    assert len(table.gate.records(0)) == 64


def test_a_gate_goes_on_where_another_ended() -> None:
    table = Table(EACH, 2, schedule={"name": "plateau"})
    for member in (0, 1, 0):
        table.push(member)
    table.gate.observe({"level": 1.0, "best": 1.0, "waited": 0})
    state = table.gate.state_dict()
    ledger = Ledger(1000)
    ledger.load_state_dict(state["ledger"])
    assert ledger.remaining(0) == 970
    assert ledger.versions(0) == (1, 3)

    other = Table(EACH, 2, schedule={"name": "plateau"})
    other.gate.load_state_dict(state)
    assert other.gate.version == 3
    assert answers(other.push(0, lease=(20, 30), seq=3)) == {0: "done"}
    assert [r.version for r in other.gate.records(1)] == [2, 3]
    assert other.gate.state_dict() == state

    cut = {key: value for key, value in state.items() if key != "pending"}
    other.gate.load_state_dict(cut)
    assert answers(other.push(0)) == {0: "void"}, "members have to enter again"
    other.gate.enter(0.0, 9, [0])
    assert answers(other.push(0, lease=(0, 30), generation=9)) == {0: "done"}
    assert answers(other.push(0, lease=(30, 40), generation=9)) == {0: "applied"}


def taken_over(table: Table, rules: dict[str, Any], members: int) -> Table:
    """Another gate in its place, with what its twin has."""
    other = Table(rules, members)
    other.gate.load_state_dict(json.loads(json.dumps(table.gate.state_dict())))
    other._seq, other._at = table._seq, table._at
    return other


def test_a_gate_that_takes_over_waits_for_those_at_work() -> None:
    rules: dict[str, Any] = {"staleness": 1, "quorum": 1}
    table = Table(rules, 3)
    table.begin(0, 1, 2)
    assert answers(table.push(0, 0)) == {2: "pulled"}, "two may be under way"
    assert table.push(2, 1) == [], "number 1 would get too old"
    other = taken_over(table, rules, 3)
    other.gate.back(0)
    assert other.push(0, 0, lease=(0, 10), seq=1) == [], "it is done, but two are under way"
    other.gate.back(1)
    other.gate.back(2)
    assert other.push(2, 1, lease=(10, 20), seq=2) == []
    assert answers(other.push(1, 0)) == {0: "done", 1: "applied"}
    assert other.gate.version == 3, "nobody is late"


def test_a_gate_that_takes_over_says_the_same_again() -> None:
    table = Table(TOGETHER, 2)
    table.push(0)
    first = answer(table.push(1, asked=Ask.SIGNAL), 0)
    assert Ask.SIGNAL.among(int(first.row[3]))
    other = taken_over(table, TOGETHER, 2)
    again = answer(other.push(0, 0, lease=(0, 10), seq=1), 0)
    assert (again.kind, again.version, again.row) == ("done", first.version, first.row)


def test_a_gate_that_takes_over_knows_who_meets() -> None:
    rules: dict[str, Any] = {"staleness": None, "quorum": 2}
    table = Table(rules, 3)
    table.begin(0, 1, 2)
    table.push(0, asked=Ask.REGROUP)
    told = table.push(1)
    assert answer(told, 0).asked == answer(told, 1).asked == Ask.REGROUP
    table.gate.rest(0.0, 0)
    other = taken_over(table, rules, 3)
    other.gate.back(2)
    last = answer(other.push(2, 0), 2)
    assert (last.kind, last.asked) == ("applied", Ask.REGROUP), "nobody else is to come"
    for member in range(3):
        other.gate.pull(0.0, member, begin=False)
    other.begin(0, 1, 2)
    assert answer(other.push(0) + other.push(1), 1).asked == 0, "the meeting is over"


def test_a_whole_epoch_is_saved_as_such() -> None:
    table = Table(EACH, 1, samples=20)
    table.push(0)
    table.push(0)
    state = table.gate.state_dict()
    assert state["ledger"] == {"samples": 20, "whole": [[0, 1, 2]], "parts": []}
    other = Table(EACH, 1, samples=20)
    other.gate.load_state_dict(state)
    assert other.gate.state_dict() == state


def test_figures_by_member() -> None:
    table = Table(EACH, 2)
    table.push(0, lease=(0, 10))
    table.push(0, lease=(0, 10))
    table.push(1, 0)
    table.push(1, finite=False)
    figures = table.gate.figures()
    assert figures["0"] == {"applied": 1, "done": 1, "staleness_0": 1}
    assert figures["1"] == {"applied": 1, "refused": 1, "staleness_1": 1}


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"quorum": 0}, "a quorum of 0"),
        ({"quorum": "most"}, "a quorum of 'most'"),
        ({"staleness": -1}, "a staleness of -1"),
        ({"samples": 0}, "samples of 0"),
        ({"steps": "many"}, "steps of 'many'"),
        ({"clip": {"norm": -1}}, "rules that make no sense"),
        ({"schedule": {"name": "odd"}}, "rules that make no sense"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, Any], why: str) -> None:
    with pytest.raises(PeerError, match=why):
        Gate(rules)


def test_a_schedule_that_does_not_know_its_end_is_refused() -> None:
    with pytest.raises(TrainingError, match="cannot keep to the schedule"):
        Gate({"schedule": {"name": "cosine"}})
