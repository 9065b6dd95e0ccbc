"""Every sample is consumed exactly once, in any order of leases, commits, returns and losses."""

from __future__ import annotations

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echelon.core.types import Lease
from echelon.data.ledger import Ledger


class Leasing(RuleBasedStateMachine):
    """Leases of one epoch drawn, committed, returned and lost in any order."""

    @initialize(samples=st.integers(1, 200))
    def begin(self, samples: int) -> None:
        self.ledger = Ledger(samples)
        self.out: list[Lease] = []
        self.done: set[int] = set()
        self.version = 0

    @rule(size=st.integers(1, 40), count=st.integers(1, 5))
    def draw(self, size: int, count: int) -> None:
        for lease, _ in zip(self.ledger.leases(0, size), range(count), strict=False):
            positions = set(range(lease.start, lease.stop))
            assert 0 < lease.size <= size
            assert positions.isdisjoint(self.done)
            assert all(positions.isdisjoint(range(o.start, o.stop)) for o in self.out)
            self.out.append(lease)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = self.take(data)
        self.version += 1
        self.ledger.commit(lease, self.version)
        self.done |= set(range(lease.start, lease.stop))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.ledger.give_back(self.take(data))

    @rule()
    def give_back_all(self) -> None:
        self.ledger.give_back_all()
        self.out = []

    @rule()
    def restart(self) -> None:
        state = json.loads(json.dumps(self.ledger.state_dict()))
        self.ledger = Ledger(self.ledger.samples)
        self.ledger.load_state_dict(state)
        self.out = []

    def take(self, data: st.DataObject) -> Lease:
        return self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))

    @invariant()
    def proof_is_right(self) -> None:
        if hasattr(self, "ledger"):
            proof = self.ledger.proof(0)
            assert (proof.once, proof.twice) == (len(self.done), 0)
            assert proof.never == self.ledger.remaining(0) == proof.samples - len(self.done)

    def teardown(self) -> None:
        """The survivors finish the epoch; no sample is missed or consumed again."""
        if not hasattr(self, "ledger"):
            return
        self.ledger.give_back_all()
        for lease in self.ledger.leases(0, 7):
            self.ledger.commit(lease, self.version)
        assert self.ledger.proof(0).once == self.ledger.samples


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
