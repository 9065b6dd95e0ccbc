"""Promises that hold for every order of events.

Members know only the frames they receive, as over the wire, and lose frames when connections
break. Coordinators are killed, and their successors know only the journal.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from echelon.cluster.coordinator.coordinator import Refusal
from echelon.cluster.coordinator.generations import Phase
from echelon.cluster.coordinator.membership import Sight
from echelon.cluster.coordinator.protocol import Message, check
from tests.cluster.coordinator.scene import Scene

SAMPLES = 200


class Actor:
    """A member as it knows itself."""

    def __init__(self, pid: int, number: int | None) -> None:
        self.pid, self.number = pid, number
        self.id: int | None = None
        self.generation = 0
        self.version = 0
        self.arrived = False
        self.read = 0
        self.connected = False
        self.alive = True


class Run(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene(expected=3, min_workers=2, samples=SAMPLES, wait=1e9)
        self.actors: list[Actor] = []
        self.formed: dict[int, list[int]] = {}
        self.waiting: set[int] = set()
        """Ids of those who have arrived and were not put into a generation since."""

    # What members do

    @rule(number=st.sampled_from([0, 1, 2, None]))
    def someone_comes(self, number: int | None) -> None:
        taken = {actor.number for actor in self.actors}
        if len([actor for actor in self.actors if actor.alive]) < 6:
            actor = Actor(1000 + len(self.actors), None if number in taken else number)
            self.actors.append(actor)
            self.scene.sights[actor.pid] = Sight("S", 0)
            self.connect(actor)

    @rule(data=st.data())
    def a_connection_breaks(self, data: st.DataObject) -> None:
        if actor := self.pick(data, connected=True):
            actor.connected = False
            self.scene.desk.disconnected(self.scene.now, self.member(actor))
            self.collect()

    @rule(data=st.data())
    def a_connection_is_made_anew(self, data: st.DataObject) -> None:
        if actor := self.pick(data, connected=False):
            self.connect(actor)

    @rule(data=st.data(), progress=st.integers(0, 5))
    def someone_arrives(self, data: st.DataObject, progress: int) -> None:
        if actor := self.pick(data, connected=True):
            self.arrive(actor, progress)

    @rule()
    def everybody_arrives(self) -> None:
        for actor in [actor for actor in self.actors if actor.alive]:
            if not actor.connected:
                self.connect(actor)
            if actor.connected:
                self.arrive(actor, 1)

    @rule(data=st.data())
    def someone_beats(self, data: st.DataObject) -> None:
        if actor := self.pick(data, connected=True):
            self.say(actor, {"kind": "beat", "step": actor.version, "doing": "x", "pace": 0.1})

    @rule(data=st.data(), count=st.integers(1, 3))
    def updates_are_told(self, data: st.DataObject, count: int) -> None:
        """By anybody who is in the generation; some of it may be known."""
        actor = self.pick(data, connected=True)
        desk = self.scene.desk
        if actor and actor.generation == desk.generations.number and actor.generation:
            known = desk.versions.recorded
            first = data.draw(st.integers(max(1, known - 2), known + 1))
            last = max(first, known + count)
            records = [[0, v % SAMPLES, v % SAMPLES + 1, v, v] for v in range(first, last + 1)]
            generation = actor.generation
            self.say(actor, {"kind": "commits", "generation": generation, "records": records})

    @rule(data=st.data(), wanted=st.integers(1, 90), epoch=st.integers(0, 2))
    def someone_leases(self, data: st.DataObject, wanted: int, epoch: int) -> None:
        if actor := self.pick(data, connected=True):
            self.say(actor, {"kind": "lease", "epoch": epoch, "wanted": wanted})

    @rule(data=st.data())
    def a_lease_is_committed(self, data: st.DataObject) -> None:
        """As an update of its own, by the member that holds it."""
        actor = self.pick(data, connected=True)
        desk = self.scene.desk
        held = [lease for id_, lease in desk.leases.owners() if actor and id_ == actor.id]
        if actor and held and actor.generation == desk.generations.number and actor.generation:
            lease = data.draw(st.sampled_from(held))
            stop = data.draw(st.integers(lease.start + 1, lease.stop))
            version = desk.versions.recorded + 1
            records = [[lease.epoch, lease.start, stop, version, version, actor.id]]
            generation = actor.generation
            self.say(actor, {"kind": "commits", "generation": generation, "records": records})

    @rule(data=st.data())
    def someone_dies(self, data: st.DataObject) -> None:
        actor = self.pick(data)
        if actor:
            actor.alive = actor.connected = False
            self.scene.sights[actor.pid] = None
            member = self.scene.desk.roster.get(-1 if actor.id is None else actor.id)
            if member is not None and data.draw(st.booleans()):
                self.scene.desk.died(self.scene.now, member)
            self.collect()

    # What happens to the coordinator

    @rule(tenths=st.integers(1, 30), silent=st.sets(st.integers(0, 5), max_size=1))
    def time_passes(self, tenths: int, silent: set[int]) -> None:
        """While all but one at most beat."""
        for _ in range(tenths):
            self.scene.now += 0.1
            for actor in [actor for actor in self.actors if actor.connected]:
                if actor.connected and actor.pid % 6 not in silent:
                    self.say(actor, {"kind": "beat", "step": actor.version, "doing": ""})
            self.scene.desk.tick(self.scene.now)
            self.collect()

    @rule()
    def the_coordinator_is_killed(self) -> None:
        before = self.scene.desk
        self.collect()
        self.scene.restart()
        after = self.scene.desk
        assert after.generations.current == before.generations.current
        assert after.versions.recorded == before.versions.recorded
        assert set(after.roster.living) == set(before.roster.living)
        assert sorted(after.leases.owners()) == sorted(before.leases.owners())
        for actor in self.actors:
            actor.connected = False
        self.waiting.clear()
        self.collect()

    # What is always so

    @invariant()
    def a_lease_is_never_held_by_two(self) -> None:
        taken: set[tuple[int, int]] = set()
        for member, (epoch, start, stop) in self.scene.desk.leases.owners():
            assert self.scene.desk.roster.get(member) is not None, "the dead hold nothing"
            mine = {(epoch, at) for at in range(start, stop)}
            assert not mine & taken
            taken |= mine

    @invariant()
    def versions_follow_one_another(self) -> None:
        written = self.scene.written("committed")
        versions = [v for e in written for v in range(e["first"], e["last"] + 1)]
        assert versions == list(range(1, len(versions) + 1))

    @invariant()
    def a_commit_is_recorded_once(self) -> None:
        done: set[tuple[int, int]] = set()
        for entry in self.scene.written("committed"):
            if "member" in entry:
                mine = {(entry["epoch"], at) for at in range(entry["start"], entry["stop"])}
                assert not mine & done
                done |= mine

    # How it is done

    def pick(self, data: st.DataObject, connected: bool | None = None) -> Actor | None:
        found = [
            actor for actor in self.actors if actor.alive and connected in (None, actor.connected)
        ]
        return data.draw(st.sampled_from(found)) if found else None

    def member(self, actor: Actor) -> Any:
        assert actor.id is not None
        return self.scene.desk.roster.living[actor.id]

    def connect(self, actor: Actor) -> None:
        fields = {"member": actor.id, "generation": actor.generation}
        number = actor.number if actor.id is None else None
        try:
            member = self.scene.hello(actor.pid, number, **fields)
        except Refusal as refusal:
            if refusal.kind == "expelled":
                actor.id, actor.generation, actor.arrived = None, 0, False
                self.connect(actor)
            return
        actor.id, actor.connected = member.id, True
        self.collect()

    def arrive(self, actor: Actor, progress: int) -> None:
        if actor.id is None:
            return
        self.waiting.add(actor.id)
        actor.arrived = True
        fields = {"generation": actor.generation, "progress": [progress], "why": "x"}
        self.say(actor, {"kind": "arrived", **fields})

    def say(self, actor: Actor, message: Message) -> None:
        check(message)
        self.scene.desk.take(self.scene.now, self.member(actor), message)
        self.collect()

    def collect(self) -> None:
        """Deliver to those who are connected; for the others it is lost."""
        self.scene.collect()
        for entry in self.scene.written("generation")[len(self.formed) :]:
            assert entry["number"] == len(self.formed) + 1, "never two with the same number"
            assert set(entry["members"]) <= self.waiting, "nobody is in who did not arrive"
            assert len(entry["members"]) == len(set(entry["members"])) >= 2
            self.formed[entry["number"]] = entry["members"]
            self.waiting -= set(entry["members"])
        for id_, messages in self.scene.inbox.items():
            actor = next((a for a in self.actors if a.id == id_ and a.connected), None)
            for message in messages if actor else []:
                assert actor is not None
                self.hear(actor, message)
        self.scene.inbox.clear()

    def hear(self, actor: Actor, message: Message) -> None:
        if message["kind"] == "generation":
            assert self.formed[message["number"]] == [m["id"] for m in message["members"]]
            assert message["members"][message["index"]]["id"] == actor.id
            assert message["number"] >= actor.generation
            assert actor.arrived or message["number"] == actor.generation
            actor.generation, actor.arrived = message["number"], False
        elif message["kind"] == "expelled":
            assert actor.id is not None
            self.waiting.discard(actor.id)
            actor.id, actor.generation, actor.connected = None, 0, False
            actor.arrived = False
        elif message["kind"] == "end":
            assert self.scene.desk.generations.phase is Phase.ENDED
            actor.alive = actor.connected = False


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=12, stateful_step_count=1000)
