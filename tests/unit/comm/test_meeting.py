"""Members find each other, or report in one line why they cannot."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.comm import Group, Place, peers
from echelon.comm.peers import Peer, Watch, interface_of, outward
from echelon.comm.shared_memory import share
from echelon.core.errors import PeerError, UserError
from tests.cluster.shared import is_alive, wait_for

from .processes import run

pytestmark = pytest.mark.timeout(120)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_group_of_one_needs_nobody() -> None:
    group = Group(Place(0, 1))
    assert group.collective().sum([2.0]) == [2.0]
    assert not group.asked
    group.close()
    with pytest.raises(PeerError, match="this member has left its group"):
        group.mesh({"all": 1})


def test_the_store_is_served_on_loopback_alone_and_at_the_port_given() -> None:
    port = free_port()
    group = Group(Place(0, 1, port=port))
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    listening = [line.split()[1] for line in lines.splitlines() if line.split()[3] == "0A"]
    group.close()
    assert [at for at in listening if at.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_a_store_served_by_somebody_else_is_joined() -> None:
    from datetime import timedelta

    agent = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    for attempt in ("first", "second"):  # the same store, nothing of the earlier try in the way
        group = Group(Place(0, 1, port=agent.port, served=True, name=attempt))
        assert group.collective().sum([1.0]) == [1.0]
        group.close()


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=f"no store can be served at 127.0.0.1:{port}: Address"):
            Group(Place(0, 2, port=port))


def test_a_store_that_nobody_serves_is_said_at_the_deadline() -> None:
    with pytest.raises(PeerError, match=r"no store at 127\.0\.0\.1:\d+ within 0\.2 s .* member 0"):
        Group(Place(1, 2, port=free_port(), deadline=0.2))


def test_a_host_that_is_not_known_is_said() -> None:
    with pytest.raises(PeerError, match=r"no store can be served at no host:0: Name or service"):
        Group(Place(0, 2, host="no host"))


def test_a_network_interface_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"network interface 'lol' is unknown; did you mean 'lo'"):
        Group(Place(0, 1, interface="lo,lol"))


def test_others_may_come_to_a_host_whose_own_name_means_loopback_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: [found])
    for host, address in (("node7", "0.0.0.0"), ("localhost", "127.0.1.1")):
        with peers._listen(Place(0, 2, host=host)) as listening:
            assert listening.getsockname()[0] == address


def test_a_member_beside_the_store_is_reached_where_others_reach_the_store() -> None:
    mine = Peer(0, 1, "a", address="127.0.0.1", store="127.0.1.1")
    beside = Peer(1, 2, "a", address="127.0.0.1", store="127.0.1.1")
    far = Peer(2, 1, "b", address="10.0.0.2", store="10.0.0.1")
    assert outward(mine, [mine, beside, far]) == "10.0.0.1"
    assert outward(far, [mine, beside, far]) == "10.0.0.2"
    assert outward(mine, [mine, beside]) == "127.0.0.1"


def test_peers_are_read_as_they_are_written() -> None:
    peer = Peer(3, 17, "a host/with spaces", False, "::1", "10.0.0.1")
    assert Peer.read(3, peer.line()) == peer


def test_addresses_belong_to_interfaces() -> None:
    assert interface_of("127.0.1.1") == interface_of("::1") == "lo"
    assert interface_of("203.0.113.77") is None
    assert interface_of("2001:db8::77") is None
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, name = line.split()
        assert interface_of(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))) == name


def test_a_store_that_stopped_does_not_hold_the_others_for_ever() -> None:
    def body(group: Group) -> Any:
        group.collective()
        if group.index == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)  # so that it is
        with pytest.raises(PeerError) as caught:
            group.collective()
        start = time.monotonic()
        with pytest.raises(PeerError):
            group.mesh({"all": 2})
        return [str(caught.value), time.monotonic() - start]

    message, again = run(2, body, may_die=[0], patience=0.5)[1]
    wanted = r"the meeting at 127\.0\.0\.1:\d+ did not answer within 0\.5 s: member 0 serves it"
    assert re.match(wanted, message), message
    assert again < 1.0, "waited twice"


def test_a_member_that_does_not_come_is_named() -> None:
    start = time.monotonic()
    with pytest.raises(PeerError, match=r"member 1 did not come to the meeting .* within 0\.3 s"):
        Group(Place(0, 2, deadline=0.3))
    assert time.monotonic() - start < 20.0


def test_a_meeting_whose_server_ended_is_said() -> None:
    def body(group: Group) -> Any:
        collective = group.collective()
        server = int(collective.sum([0.0 if group.index else float(os.getpid())])[0])
        if group.index == 0:
            os._exit(3)
        wait_for(lambda: not is_alive(server))
        with pytest.raises(PeerError, match=r"the meeting at 127\.0\.0\.1:\d+ cannot be reached"):
            group.collective()
        return True

    assert run(2, body, may_die=[0])[1]


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_a_member_that_ended_before_all_were_connected_is_named(hosts: str | None) -> None:
    def body(group: Group) -> Any:
        if group.index == 1:
            os._exit(3)
        start = time.monotonic()
        with pytest.raises(PeerError, match="member 1") as caught:
            group.collective()
        return [str(caught.value), time.monotonic() - start]

    patience = 30.0 if hosts is None else 1.0
    message, took = run(2, body, hosts=hosts, may_die=[1], patience=patience)[0]
    if hosts is None:
        assert "ended; its memory was awaited" in message
        assert took < 10.0
    else:
        assert "did not come to the meeting" in message


def test_members_in_different_places_close_in_any_order() -> None:
    def body(group: Group) -> Any:
        group.collective()
        if group.index == 1:
            time.sleep(0.2)  # the store must still be there
            group.collective([1, 2])
        if group.index == 2:
            group.collective([1, 2])
        return True

    assert all(run(3, body))


def test_memory_that_cannot_be_opened_is_one_line() -> None:
    def body(group: Group) -> Any:
        meeting = group._store()
        owner = Peer(0, os.getpid() if group.index == 0 else 2**22 + 1, "x")
        members = [owner, Peer(1, 0, "x")]
        if group.index == 1:
            with pytest.raises(PeerError, match=r"the memory of member 0 \(pid \d+\) cannot be"):
                share(meeting, "key", members, 4096)
            meeting.say("key/open/1")
        else:
            share(meeting, "key", members, 4096)
        return True

    assert all(run(2, body))


def test_memory_of_one_that_has_left_is_not_mistaken_for_what_has_its_number_now() -> None:
    def body(group: Group) -> Any:
        meeting = group._store()
        if group.index == 1:
            [pid] = meeting.gather("pid", [0], "")
            owner = Peer(0, int(pid), "x")
            with pytest.raises(PeerError, match=r"member 0 \(pid \d+\) has left before all had"):
                share(meeting, "key", [owner, Peer(1, 0, "x")], 4096)
            meeting.gather("done", [1], "")
        else:
            other = os.memfd_create("other")
            meeting.gather("pid", [0], str(os.getpid()))
            meeting.gather("key/file", [0], f"{other} echelon-0123")
            meeting.gather("done", [1], "")
            os.close(other)
        return True

    assert all(run(2, body))


def test_a_process_that_is_gone_already_counts_as_ended() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    zombie, other = Peer(1, child, "x"), Peer(2, os.getpid(), "x")
    watch = Watch([zombie, other])
    assert watch.ended(zombie)
    assert not watch.ended(other)
    assert not watch.ended(Peer(3, 1, "elsewhere"))
    os.waitpid(child, 0)
    watch.close()
    gone = Watch([zombie])
    assert gone.ended(zombie)
    gone.close()
