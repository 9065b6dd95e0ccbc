"""When a fault was noticed and when it was over, as the journal has it."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.cluster.chaos.deeds import Deed
from echelon.cluster.chaos.scene import Entry, Scene

_CLOCKS = 0.002
"""Seconds by which an entry may be older than it should be: its time is rounded."""


def measure(deed: Deed, scene: Scene) -> None:
    """Fill in what became of a fault."""
    if deed.skipped is not None:
        return
    verb = deed.fault.verb
    if deed.coordinator:
        _coordinator(deed, scene)
    elif verb == "join":
        _join(deed, scene)
    elif verb == "slow":
        _slow(deed, scene)
    elif verb in ("kill", "freeze", "partition"):
        _loss(deed, scene)


def _coordinator(deed: Deed, scene: Scene) -> None:
    if deed.fault.verb == "freeze":
        deed.note = "training went on without it"
        return
    again = next(_since(scene, deed.moment, "coordinator"), None)
    if again is not None:
        deed.detected = again["time"] - deed.moment
        deed.recovered = _next_update(scene, again["time"], 0, deed.moment)


def _loss(deed: Deed, scene: Scene) -> None:
    [member] = deed.members
    lost = next((e for e in _since(scene, deed.moment, "lost") if e["member"] == member), None)
    if lost is None or lost["how"] == "left":
        deed.note = "the run was over first" if lost else "too short to be noticed"
        return
    if lost["how"] == "killed" and deed.fault.verb != "kill":
        deed.note = "killed before it was noticed"
        return
    deed.detected = lost["time"] - deed.moment
    formed = next(_since(scene, lost["time"], "generation"), None)
    if not _took_part(scene, member, lost["time"]):
        deed.note = "it did not take part yet"
    elif formed is not None:
        deed.recovered = _next_update(scene, formed["time"], formed["number"], deed.moment)
        deed.lost_steps = _undone(scene, lost["time"])
    if deed.fault.verb != "kill":
        deed.note = _came_back(deed, scene, lost["time"])


def _took_part(scene: Scene, member: int, moment: float) -> bool:
    """Whether it was in a generation by then."""
    formed = (e for e in scene.events if e["kind"] == "generation" and e["time"] <= moment)
    return any(member in entry["members"] for entry in formed)


def _undone(scene: Scene, moment: float) -> int:
    """Updates that had to be made again, until the next one after a loss."""
    healed = next(_since(scene, moment, "recovered"), None)
    return 0 if healed is None else int(healed["lost_steps"])


def _came_back(deed: Deed, scene: Scene, moment: float) -> str:
    back = (e for e in _since(scene, moment, "joined") if e["pid"] == deed.pids[0])
    found = next(back, None)
    if found is None:
        return "it did not come back before the end"
    return f"back as member {found['member']} {found['time'] - deed.moment:.1f} s after the fault"


def _join(deed: Deed, scene: Scene) -> None:
    came = [e for e in _since(scene, deed.moment, "joined") if e["pid"] in deed.pids]
    deed.members = [entry["member"] for entry in came]
    if len(came) < deed.fault.count:
        deed.note = "the run was over first"
        return
    deed.detected = came[-1]["time"] - deed.moment
    for entry in _since(scene, came[-1]["time"], "generation"):
        if deed.members[-1] in entry["members"]:
            deed.recovered = _next_update(scene, entry["time"], entry["number"], deed.moment)
            return
    deed.note = "the run was over before it took part"


def _slow(deed: Deed, scene: Scene) -> None:
    """Noticed where batches are divided anew, or somebody is told whom all wait for."""
    until = deed.moment + deed.fault.seconds
    signs = [e for kind in ("shares", "stalled") for e in _since(scene, deed.moment, kind)]
    times = [entry["time"] for entry in signs if entry["time"] <= until]
    deed.detected = min(times) - deed.moment if times else None
    deed.note = "batches are divided anew" if times else "too short to be noticed"


def _next_update(scene: Scene, moment: float, generation: int, since: float) -> float | None:
    """The first one from then on, or the run's end if none was left to be made."""
    for commit in scene.commits:
        if commit.time >= moment - _CLOCKS and commit.generation >= generation:
            return commit.time - since
    ended = next(_since(scene, moment, "finished"), None)
    return None if ended is None else ended["time"] - since


def _since(scene: Scene, moment: float, kind: str) -> Iterator[Entry]:
    return (e for e in scene.events if e["kind"] == kind and e["time"] >= moment - _CLOCKS)
