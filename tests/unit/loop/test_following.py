"""Members go on from where their servers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from echelon.loop import following
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
    monkeypatch.setattr(following, "_go_back", lambda _: found.append("went back"))
    comm = SimpleNamespace(rolled_back=lambda at, _why: found.append(f"rolled back to {at}"))
    fellows = SimpleNamespace(sum=lambda mine: mine + behind, led=lambda at, _: [at, 2])
    run: Any = SimpleNamespace(strategy=Servers(), comm=comm, fellows=fellows, met_at=4)
    run.version = version
    following.follow(cast(Run, run), recorded)
    assert found == done
    assert (run.version, run.met_at) == (5, 2)  # as the first one has it
