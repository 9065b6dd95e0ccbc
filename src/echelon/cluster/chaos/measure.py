"""What faults cost: seconds to detection and to recovery, steps lost, and the weights in the end.

`measure` fills in one fault from the journal of its run, `kinds` and `losses` summarize many, and
`difference` compares the final weights of two runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from echelon import strategy
from echelon.checkpoint import Shelf
from echelon.checkpoint.store import CHECKPOINTS
from echelon.cluster.chaos.view import Deed, Entry, Scene
from echelon.core.config import Job
from echelon.loop.inference import final_model
from echelon.task import load_task

_LATE = 3.0
"""Seconds after the end of a fault in which it may still be detected."""
_LOSING = ("kill", "freeze", "partition")
"""Faults that cost the run a member."""
_IN_FLIGHT = 1.0
"""Seconds after a fault in which updates from before it may still be journaled."""
_CLOCKS = 0.002
"""Seconds by which an entry may seem too old, because its time is rounded."""
ALIKE = 1e-4
"""The largest difference of a weight that rounding may make."""


# One fault, in the journal of its run.


def measure(deed: Deed, scene: Scene, others: Sequence[Deed] = ()) -> None:
    """Fill in what became of a fault. A later one of `others` may have caused a loss that seems to
    be its consequence."""
    if deed.skipped is not None:
        return
    verb = deed.fault.verb
    if deed.coordinator:
        _coordinator(deed, scene)
    elif deed.server is not None:
        _server(deed, scene)
    elif verb == "join":
        _join(deed, scene)
    elif verb == "slow":
        _slow(deed, scene)
    elif verb in _LOSING:
        _loss(deed, scene, others)


def _coordinator(deed: Deed, scene: Scene) -> None:
    if deed.fault.verb == "freeze":
        deed.note = "training went on without it"
        return
    again = next(_since(scene, deed.moment, "coordinator"), None)
    if again is not None:
        deed.detected = again["time"] - deed.moment
        deed.recovered = _next_update(scene, again["time"], 0, deed.moment)


def _server(deed: Deed, scene: Scene) -> None:
    """Measure a killed server: detected when members roll back. If its replica takes over, they do
    not, and only the update that follows can be measured."""
    back = next(_since(scene, deed.moment, "rolled_back"), None)
    if back is not None and _went_on(scene, deed.moment + _IN_FLIGHT, back["time"]):
        back = None  # updates were made in between: the rollback has a later cause
    since = deed.moment if back is None else back["time"]
    deed.recovered = _next_update(scene, since, 0, deed.moment)
    if back is None:
        deed.note = "nothing was lost"
        return
    deed.detected = back["time"] - deed.moment
    deed.lost_steps = max(0, deed.version - back["version"])
    deed.note = f"went back to version {back['version']:,}"


def _went_on(scene: Scene, start: float, stop: float) -> bool:
    """Return whether updates were journaled between two times."""
    return any(start < commit.time < stop for commit in scene.commits)


def _loss(deed: Deed, scene: Scene, others: Sequence[Deed]) -> None:
    [member] = deed.members
    lost = next((e for e in _since(scene, deed.moment, "lost") if e["member"] == member), None)
    if note := _unnoticed(deed, lost) or _explained_by_later(deed, lost, others):
        deed.note = note
        return
    assert lost is not None
    deed.detected = lost["time"] - deed.moment
    formed = next(_since(scene, lost["time"], "generation"), None)
    if not _took_part(scene, member, lost["time"]):
        deed.note = "it did not take part yet"
    elif formed is not None:
        deed.recovered = _next_update(scene, formed["time"], formed["number"], deed.moment)
        deed.lost_steps = _undone(scene, lost["time"])
    if deed.fault.verb != "kill":
        deed.note = _came_back(deed, scene, lost["time"])


def _unnoticed(deed: Deed, lost: Entry | None) -> str | None:
    """Return why a loss is not a consequence of this fault; None if it is."""
    if lost is not None and lost["how"] == "left":
        return "the run was over first"
    if deed.fault.verb == "kill":
        return None if lost is not None else "the run was over first"
    if lost is None or lost["time"] > deed.moment + deed.fault.seconds + _LATE:
        return "too short to be noticed"
    return "killed before it was noticed" if lost["how"] == "killed" else None


def _explained_by_later(deed: Deed, lost: Entry | None, others: Sequence[Deed]) -> str | None:
    """Return a note if a later fault of the same member explains its loss, else None."""
    if deed.fault.verb == "kill" or lost is None:
        return None
    over = deed.moment + deed.fault.seconds
    later = (other for other in others if over < other.moment <= lost["time"])
    if any(other.members == deed.members and other.fault.verb in _LOSING for other in later):
        return "too short to be noticed"
    return None


def _took_part(scene: Scene, member: int, moment: float) -> bool:
    """Return whether a member had been in a generation by then."""
    formed = (e for e in scene.events if e["kind"] == "generation" and e["time"] <= moment)
    return any(member in entry["members"] for entry in formed)


def _undone(scene: Scene, moment: float) -> int:
    """Return how many updates had to be repeated after a loss."""
    healed = next(_since(scene, moment, "recovered"), None)
    return 0 if healed is None else int(healed["lost_steps"])


def _came_back(deed: Deed, scene: Scene, moment: float) -> str:
    back = (e for e in _since(scene, moment, "joined") if e["pid"] == deed.pids[0])
    found = next(back, None)
    if found is None:
        return "it did not come back before the end"
    return f"back as member {found['member']} {found['time'] - deed.moment:.1f} s after the fault"


def _join(deed: Deed, scene: Scene) -> None:
    first = {entry["pid"]: entry for entry in reversed(list(_since(scene, deed.moment, "joined")))}
    came = [entry for pid, entry in first.items() if pid in deed.pids]
    deed.members = [entry["member"] for entry in came]
    if len(came) < deed.fault.count:
        deed.note = "the run was over first"
        return
    last = max(came, key=lambda entry: entry["time"])
    deed.detected = last["time"] - deed.moment
    for entry in _since(scene, last["time"], "generation"):
        if last["member"] in entry["members"]:
            deed.recovered = _next_update(scene, entry["time"], entry["number"], deed.moment)
            return
    deed.note = "the run was over before it took part"


def _slow(deed: Deed, scene: Scene) -> None:
    """Detected when batches are divided again, or when a stall is reported."""
    until = deed.moment + deed.fault.seconds
    signs = [e for kind in ("shares", "stalled") for e in _since(scene, deed.moment, kind)]
    times = [entry["time"] for entry in signs if entry["time"] <= until]
    deed.detected = min(times) - deed.moment if times else None
    deed.note = "batches are divided anew" if times else "nobody had to wait for long"


def _next_update(scene: Scene, moment: float, generation: int, since: float) -> float | None:
    """Return the seconds from `since` to the first update at `moment` or later, of this generation
    or a later one; if there is none, to the run's end."""
    for commit in scene.commits:
        if commit.time >= moment - _CLOCKS and commit.generation >= generation:
            return max(0.0, commit.time - since)  # clocks may differ by a little
    ended = next(_since(scene, moment, "finished"), None)
    return None if ended is None else ended["time"] - since


def _since(scene: Scene, moment: float, kind: str) -> Iterator[Entry]:
    return (e for e in scene.events if e["kind"] == kind and e["time"] >= moment - _CLOCKS)


# Many faults.


def losses(deeds: Sequence[Deed]) -> Kind:
    """Return a summary of the faults that cost a member; joins take as long as a start takes."""
    return _kind("loss", [deed for deed in deeds if deed.fault.verb in _LOSING])


def kinds(deeds: Sequence[Deed]) -> list[Kind]:
    """Return a summary per kind, sorted by name."""
    names = sorted({_name(deed) for deed in deeds})
    return [_kind(name, [deed for deed in deeds if _name(deed) == name]) for name in names]


@dataclass(frozen=True, slots=True)
class Kind:
    """Summary of the faults of one kind."""

    name: str
    happened: int
    detected: Figures
    recovered: Figures


@dataclass(frozen=True, slots=True)
class Figures:
    """Count, median and maximum of seconds, over the faults for which they are known."""

    count: int
    median: float | None
    worst: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Figures:
        known = [value for value in values if value is not None]
        if not known:
            return cls(0, None, None)
        return cls(len(known), round(statistics.median(known), 3), round(max(known), 3))


def _kind(name: str, deeds: Sequence[Deed]) -> Kind:
    detected = Figures.of(deed.detected for deed in deeds)
    return Kind(name, len(deeds), detected, Figures.of(deed.recovered for deed in deeds))


def _name(deed: Deed) -> str:
    """Return a fault's kind: `kill trainer`, for any trainer."""
    return f"{deed.fault.verb} {deed.fault.target}".strip()


# The weights of two runs.


def difference(job: Job, one: Path, other: Path, tolerance: float = ALIKE) -> Difference:
    """Compare the last checkpoints of two runs of `job`, given by their folders."""
    cuts = [Shelf(folder / CHECKPOINTS).load("last") for folder in (one, other)]
    first, second = (cut["strategy"]["model"] for cut in cuts)
    # NaN compares as neither larger nor smaller, so `max` could drop it.
    largest = max(_apart(first, second), default=0.0, key=lambda x: math.inf if x != x else x)
    return Difference(largest, _unlike(job, one, cuts), tolerance)


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between the final weights of two runs."""

    largest: float
    unlike: str | None
    """Why they may differ by more than rounding; None if they may not."""
    tolerance: float = ALIKE

    @property
    def is_alike(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def problem(self) -> str | None:
        """The difference as an error message, if it is too large."""
        if self.is_alike or self.unlike is not None:
            return None
        return f"a weight differs by {self.largest:.1e}, which is more than {self.tolerance:g}"


def _apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Iterator[float]:
    for name, values in first.items():
        if values.numel():
            yield float((values.double() - second[name].double()).abs().max())


def in_any_order(job: Job) -> bool:
    """Return whether updates are asynchronous, so that no two runs make the same ones."""
    return strategy.has_servers(job) and not job.parameter_server.together


def _unlike(job: Job, folder: Path, cuts: list[dict[str, Any]]) -> str | None:
    if in_any_order(job):
        return "trainers made updates in another order"
    versions = [cut["strategy"]["version"] for cut in cuts]
    if len(set(versions)) > 1:
        return f"they made {versions[0]:,} and {versions[1]:,} updates"
    modules = list(final_model(job, load_task(job), folder).modules())
    if any(isinstance(module, _DropoutNd) and module.p for module in modules):
        return "dropout draws anew for other members"
    own = job.sync.batch_norm == "local"
    if own and any(isinstance(module, _BatchNorm) for module in modules):
        return "batch norm's statistics are of each member's own samples"
    return None
