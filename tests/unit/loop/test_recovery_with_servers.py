"""After a membership change, members continue from the version of the servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from echelon.loop import recovery
from echelon.loop.run import Run


class Servers:
    lacks_state, apart = False, True

    def pull(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("version", "behind", "recorded", "done"),
    [
        (5, 0, 5, []),
        (5, 0, 9, ["rolled back to 5"]),  # whoever was to say so was lost
        (9, 0, 9, ["went back"]),
        (5, 1, 9, ["went back"]),  # another member has not heard of it
    ],
)
def test_the_record_is_never_ahead_of_the_servers(
    monkeypatch: pytest.MonkeyPatch, version: int, behind: int, recorded: int, done: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(recovery, "_restore_servers", lambda *_: found.append("went back"))
    comm = SimpleNamespace(rolled_back=lambda at, _why: found.append(f"rolled back to {at}"))
    fellows = SimpleNamespace(sum=lambda mine: mine + behind, led=lambda at, _: [at, 2])
    run: Any = SimpleNamespace(strategy=Servers(), comm=comm, fellows=fellows, met_at=4)
    run.version = version
    recovery.follow(cast(Run, run), recorded)
    assert found == done
    assert (run.version, run.met_at) == (5, 2)  # as the first one has it


class Together(Servers):
    """Whose gate has forgotten what others have heard of."""

    apart = False

    def unheard(self, version: int) -> list[tuple[int, ...]]:
        return [(0, 30, 60, at, 0) for at in (4, 5) if at > version]


@pytest.mark.parametrize(("version", "back"), [(5, False), (3, False), (2, True)])
def test_updates_whose_samples_nobody_knows_are_taken_back(
    monkeypatch: pytest.MonkeyPatch, version: int, back: bool
) -> None:
    went: list[str] = []
    monkeypatch.setattr(recovery, "_restore_servers", lambda _, why: went.append(why))
    run: Any = SimpleNamespace(strategy=Together(), version=version)
    run.fellows = SimpleNamespace(sum=lambda mine: mine)
    run.ledger = SimpleNamespace(take_in=lambda *_: None)
    recovery.follow(cast(Run, run), recorded=version)
    assert went == ["whoever knew the samples of the last updates was lost"] * back
    assert run.version == 5 or back
