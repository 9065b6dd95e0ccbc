"""The report of a journal, with every count compared with one made sample by sample."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import DataError
from echelon.core.types import Lease, Shard
from echelon.data.journal import JOURNAL, Journal
from echelon.data.ledger import Ledger, counts, edges
from echelon.data.loader import _parts
from echelon.data.proof import Account, account, replay

Line = tuple[str, dict[str, Any]]


def line(kind: str, **fields: Any) -> Line:
    return kind, fields


def begun(samples: int = 100, batch_size: int = 10) -> Line:
    return line("begun", run="digits-0001", samples=samples, batch_size=batch_size, seed=0)


def generation(number: int, *members: int, **fields: Any) -> Line:
    return line("generation", number=number, members=list(members), version=0, why="", **fields)


def committed(epoch: int, start: int, stop: int, first: int, last: int, **fields: Any) -> Line:
    span = {"epoch": epoch, "start": start, "stop": stop, "first": first, "last": last}
    return line("committed", **{"generation": 1, **span, **fields})


def written(path: Path, *lines: Line) -> Path:
    """Write a journal with these lines, one second apart."""
    with path.open("a", encoding="utf-8") as file:
        for second, (kind, fields) in enumerate(lines):
            file.write(json.dumps({"kind": kind, "time": 1000.0 + second, **fields}) + "\n")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL


def proved(path: Path, *lines: Line) -> Account:
    return account(replay(written(path, *lines)))


def test_an_undisturbed_run(path: Path) -> None:
    found = proved(
        path,
        begun(95),
        generation(1, 0, 1, 2),
        committed(0, 0, 40, 1, 4),
        committed(0, 40, 95, 5, 10),
        committed(1, 0, 30, 11, 13),
        line("finished", status="done", version=13),
    )
    first, second = found.epochs
    assert (first.once, first.twice, first.never, first.first, first.last) == (95, 0, 0, 1, 10)
    assert (first.finished, second.finished) == (True, False)
    assert (second.once, second.never) == (30, 65)
    assert first.members == {0: 28, 1: 29, 2: 38}  # of 10: 3, 3, 4; of the last 5: 1, 2, 2
    assert sum(found.members.values()) == 125
    assert (found.problems, found.status, found.version) == ([], "done", 13)
    assert json.loads(json.dumps(found.as_data()))["exactly_once"] is True


def test_a_rollback_undoes_what_came_after_it(path: Path) -> None:
    found = proved(
        path,
        begun(),
        generation(1, 0),
        committed(0, 0, 70, 1, 7),
        line("rolled_back", version=4, why="resumed"),
        begun(),
        generation(2, 0, 1),
        committed(0, 40, 60, 5, 6, generation=2),
        committed(0, 60, 100, 7, 10, generation=2),
    )
    (epoch,) = found.epochs
    assert (epoch.once, epoch.twice, epoch.never) == (100, 0, 0)
    assert epoch.members == {0: 40 + 30, 1: 30}
    back, resumed = found.happenings
    assert resumed.kind == "resumed"
    # From the last line before it, the third, to the one that made version 7 again, the eighth.
    assert (back.kind, back.version, back.lost_steps, back.seconds) == ("rolled_back", 7, 3, 5.0)
    assert found.problems == []


def test_what_is_left_out_at_the_version_of_a_cut_is_known_by_the_cut(path: Path) -> None:
    before = [begun(), generation(1, 0), committed(0, 0, 20, 1, 2), committed(0, 20, 30, 3, 2)]
    rest = committed(0, 30, 100, 3, 9)
    found = proved(path, *before, line("rolled_back", version=2, why="", left_out=[[0, 20, 30]]))
    assert (found.epochs[0].once, found.epochs[0].left_out) == (20, 10)
    found = proved(path, rest)
    assert (found.epochs[0].once, found.epochs[0].left_out, found.problems) == (90, 10, [])
    path.unlink()
    again = committed(0, 20, 100, 3, 10)
    found = proved(path, *before, line("rolled_back", version=2, why="", left_out=[]), again)
    assert (found.epochs[0].once, found.epochs[0].left_out, found.problems) == (100, 0, [])


def test_shares_decide_who_did_how_much(path: Path) -> None:
    found = proved(
        path,
        begun(),
        generation(1, 4, 7),
        committed(0, 0, 40, 1, 4),
        line("shares", generation=1, version=3, shares=[3, 1]),
        committed(0, 40, 60, 5, 6),
        generation(2, 7, 4, shares=[1, 4]),
        committed(0, 60, 100, 7, 10, generation=2),
    )
    # Two updates with equal shares, four with 7 of 10 and 3 of 10, then four with 2 and 8.
    assert found.members == {4: 10 + 28 + 32, 7: 10 + 12 + 8}


def test_members_that_hold_one_model_together_work_on_the_same_samples(path: Path) -> None:
    found = proved(path, begun(), generation(1, 0, 1, 2, 3, parts=2), committed(0, 0, 100, 1, 10))
    assert found.members == {0: 50, 1: 50, 2: 50, 3: 50}


def test_a_commit_of_one_member_is_its_own_and_may_come_late(path: Path) -> None:
    found = proved(
        path,
        begun(),
        generation(1, 0, 1),
        committed(0, 0, 60, 2, 2, member=1),
        committed(0, 60, 100, 1, 1, member=0),
    )
    assert (found.members, found.problems) == ({0: 40, 1: 60}, [])


def test_failures_and_what_they_cost(path: Path) -> None:
    found = proved(
        path,
        begun(),
        line("coordinator", pid=4, again=False),
        line("joined", member=0, pid=5, host="a", name="trainer"),
        generation(1, 0, 1, 2),
        committed(0, 0, 20, 1, 2),
        line("lost", member=1, how="killed", why="signal 9", quiet=0.1),
        line("lost", member=2, how="left", why="", quiet=0),
        generation(2, 0),
        committed(0, 20, 30, 3, 3, generation=2),
        line("recovered", generation=2, seconds=0.8, lost_steps=1),
        line("stalled", member=0, text="waiting for member 0"),
        line("coordinator", pid=9, again=True),
        line("joined", member=3, pid=77, host="b/0a9f/pid:[4026531836]", name="trainer"),
        line("told", text="not of our concern"),
        line("finished", status="stopped", version=3),
        line("lost", member=0, how="left", why="", quiet=0),
    )
    told = [(h.kind, h.member, h.text, h.seconds, h.lost_steps) for h in found.happenings]
    assert told == [
        ("lost", 1, "killed: signal 9", 0.8, 1),
        ("lost", 2, "left", 0.8, 1),
        ("stalled", 0, "waiting for member 0", None, None),
        ("coordinator", None, "started again as process 9", None, None),
        ("joined", 3, "process 77 on b", None, None),
    ]
    assert [h.kind for h in found.failures] == ["lost", "lost", "coordinator"]
    assert found.generations == 2


def test_members_that_leave_when_the_run_is_over_are_not_lost(path: Path) -> None:
    for end in (line("over", status="done"), line("finished", status="done", version=0)):
        leave = line("lost", member=0, how="left", why="", quiet=0)
        assert proved(path, begun(), generation(1, 0), end, leave).failures == []
        path.unlink()


def test_a_line_that_was_written_twice_counts_once(path: Path) -> None:
    twice = [committed(0, 0, 50, 1, 5)] * 2 + [committed(0, 50, 60, 6, 5)] * 2
    found = proved(path, begun(), generation(1, 0), *twice)
    assert (found.epochs[0].once, found.epochs[0].left_out, found.problems) == (50, 10, [])


def test_a_run_without_a_journal_can_be_taken_over(path: Path) -> None:
    ledger = Ledger(100)
    for epoch, count in ((0, 10), (1, 3)):
        for version, lease in zip(range(1, count + 1), ledger.leases(epoch, 10), strict=False):
            ledger.commit(lease, 10 * epoch + version)
        ledger.give_back_all()
    ledger.leave_out(next(ledger.leases(1, 10)), 13)
    taken = line("taken_over", version=13, ledger=ledger.state_dict(), left_out=[[1, 30, 40]])
    found = proved(path, begun(), taken, generation(1, 0), committed(1, 40, 100, 14, 19))
    assert [(e.once, e.left_out, e.twice, e.never) for e in found.epochs] == [
        (100, 0, 0, 0),
        (90, 10, 0, 0),
    ]
    assert (found.taken_over, found.problems, found.members) == (13, [], {0: 60})


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([committed(0, 0, 50, 1, 5), committed(0, 60, 100, 6, 9), committed(1, 0, 10, 10, 10)],
         "epoch 0: 10 samples never (positions 50 to 60)"),
        ([committed(0, 0, 50, 1, 5), committed(0, 40, 100, 6, 11)],
         "epoch 0: 10 samples twice (positions 40 to 50)"),
        ([committed(0, 0, 50, 1, 5), committed(0, 50, 60, 7, 7)],
         "epoch 0: 1 updates between version 5 and 7 are not in the journal"),
        ([committed(0, 0, 50, 1, 5), committed(0, 50, 60, 5, 5)],
         "epoch 0: version 5 follows version 5: positions 50 to 60 were committed in the past"),
        ([committed(2, 0, 50, 1, 5)], "epochs 0 to 1: all samples never"),
        ([committed(0, 0, 50, 1, 5), line("finished", status="done", version=7)],
         "the run ended at version 7 and the commits end at 5"),
        ([line("rolled_back", version=9, why="")],
         "the run went on from version 9 when 0 was the last"),
        ([committed(0, 0, 50, 1, 5, generation=3)],
         "generation 3 made updates and is not in the journal"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(path: Path, lines: list[Line], problem: str) -> None:
    assert proved(path, begun(), generation(1, 0), *lines).problems == [problem]


def test_many_ranges_are_counted(path: Path) -> None:
    holes = [committed(0, 20 * n, 20 * n + 10, n + 1, n + 1) for n in range(5)]
    found = proved(path, begun(), generation(1, 0), *holes, committed(1, 0, 10, 6, 6))
    (problem,) = found.problems
    assert problem == (
        "epoch 0: 50 samples never (positions 10 to 20, 30 to 40, 50 to 60 and 2 more ranges)"
    )


def test_a_problem_that_was_undone_is_none(path: Path) -> None:
    found = proved(
        path,
        begun(),
        generation(1, 0),
        committed(0, 0, 50, 1, 5),
        committed(0, 40, 60, 7, 8),
        line("rolled_back", version=5, why=""),
        committed(0, 50, 60, 6, 6),
    )
    assert found.problems == []


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (committed(0, 0, 50, 1, 5), "committed: a commit before the run began"),
        (line("begun", samples=0), "begun: samples is 0, and must be a whole number from 1 on"),
        (line("begun", samples=9), "begun: has no 'batch_size'"),
        (line("generation", number=1, members=3), "generation: members are 3, and must be a list"),
        (line("shares", generation=1, version=1, shares=[1]), "1 shares are not those of gener"),
        (line("shares", generation=1, version=1, shares=[0, 0]), r"shares \[0.0, 0.0\] cannot be"),
        (line("finished", version=True, status=""), "finished: version is True, and must be"),
    ],
)
def test_an_entry_that_cannot_be_is_named_by_its_line(path: Path, wrong: Line, what: str) -> None:
    written(path, line("told", text=""), wrong)
    with pytest.raises(DataError, match=rf"{JOURNAL}, line 2: .*{what}"):
        replay(path)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (begun(101), "the run has 101 samples, and began with 100"),
        (committed(0, 50, 50, 1, 1), "a commit of positions 50 to 50 cannot be"),
        (committed(0, 50, 101, 1, 1), "a commit of positions 50 to 101 cannot be"),
        (committed(0, 50, 60, 3, 1), "a commit of positions 50 to 60 cannot be"),
    ],
)
def test_a_commit_that_cannot_be_is_named_by_its_line(path: Path, wrong: Line, what: str) -> None:
    written(path, begun(), wrong)
    with pytest.raises(DataError, match=rf"{JOURNAL}, line 2: \w+: {what}"):
        replay(path)


def test_equal_shares_split_as_the_loader_does() -> None:
    for size in (*range(40), 1_000_003):
        for count in range(1, 9):
            parts = [_parts([Lease(0, 0, size)], Shard(n, count))[0] for n in range(count)]
            assert counts(size, [1.0] * count) == [stop - start for start, stop in parts]


def test_shares_are_kept_within_one_sample() -> None:
    assert edges(10, [3, 1, 0]) == [0, 7, 10, 10]
    draw = random.Random(0)
    for _ in range(200):
        shares = [draw.random() for _ in range(draw.randint(1, 9))]
        for count, share in zip(counts(997, shares), shares, strict=True):
            assert abs(count - 997 * share / sum(shares)) < 1


@pytest.mark.parametrize("seed", range(12))
def test_a_run_full_of_crashes_is_accounted_for_exactly(path: Path, seed: int) -> None:
    """Commits, samples left out, checkpoints, crashes with other members and batch sizes."""
    draw = random.Random(seed)
    samples = draw.randint(50, 400)
    once: Counter[tuple[int, int]] = Counter()
    did: Counter[int] = Counter()
    left: list[Lease] = []
    cut: tuple[Any, ...] = (Ledger(samples).state_dict(), 0, [], Counter(), Counter())
    for number in range(1, 9):
        state, version, kept, *counted = cut
        left, once, did = list(kept), counted[0].copy(), counted[1].copy()
        size, count = draw.randint(3, 30), draw.randint(1, 4)
        ledger = Ledger(samples)
        ledger.load_state_dict(json.loads(json.dumps(state)))
        with Journal(path) as journal:
            if number > 1:
                journal.add("rolled_back", version=version, why="", left_out=left)
            journal.add("begun", samples=samples, batch_size=size)
            journal.add("generation", number=number, members=list(range(count)))

            def told(journal: Journal = journal, ledger: Ledger = ledger, n: int = number) -> None:
                for record in ledger.drain():
                    journal.add("committed", generation=n, **record._asdict())

            epoch = next(n for n in range(99) if ledger.remaining(n))
            for _ in range(draw.randint(1, 60)):
                if not ledger.remaining(epoch):
                    epoch += 1
                lease = next(ledger.leases(epoch, size))
                once.update((epoch, position) for position in range(lease.start, lease.stop))
                if draw.random() < 0.1:
                    ledger.leave_out(lease, version)
                    left.append(lease)
                else:
                    version += 1
                    ledger.commit(lease, version)
                    for n in range(count):
                        ((start, stop),) = _parts([lease], Shard(n, count))
                        did[n] += stop - start
                if draw.random() < 0.2:
                    told()
                if draw.random() < 0.1:
                    told()
                    cut = (ledger.state_dict(), version, list(left), once.copy(), did.copy())
            told()
    found = account(replay(path))
    assert found.problems == []
    assert sum(e.once + e.left_out for e in found.epochs) == len(once)
    assert set(once.values()) == {1}
    assert found.version == version
    assert sum(e.left_out for e in found.epochs) == sum(lease.size for lease in left)
    assert found.members == {n: count for n, count in sorted(did.items()) if count or n == 0}
