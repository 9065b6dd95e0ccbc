"""A trainer's connection to its servers: how weights and state come and go.

setup, rejoin   set_up ─▶ are the servers empty? the first trainer uploads a state ─▶ enter
before a step   pull: parameters are the servers' memory from then on, or memory they write to
a checkpoint    parameters and buffers from here, the optimizer's state from the servers
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from echelon.comm.ps.client import Servers
from echelon.comm.ps.layout import Layout
from echelon.comm.ps.messages import Directory
from echelon.comm.ps.rows import RemoteTables
from echelon.core.errors import ConfigError, PeerError
from echelon.core.interfaces import Comm, Task
from echelon.core.types import Lease, Numerics, Parallel, RowSpec, Shard
from echelon.data.sources import as_source
from echelon.optim.build import penalised
from echelon.strategy.all_reduce import AllReduce
from echelon.strategy.model import load_weights
from echelon.strategy.parameter_server.gradients import Pushes
from echelon.strategy.parameter_server.merit import Judge, held_out
from echelon.strategy.registry import OWN_OPTIMIZER
from echelon.strategy.tables import RowUpdates, remote_state


class Connected(AllReduce):
    """A strategy whose weights and optimizer live on servers.

    The trainer itself has only what is not trained: frozen parameters and buffers.
    """

    remote = True
    lacks_state = False
    _sum: Pushes  # type: ignore[assignment]
    _servers: Servers | None = None
    _member = -1
    _bound = False
    """Whether parameters are memory of the servers, or memory that they write to."""
    _stale = False
    """Whether the servers may have other weights than the parameters hold."""
    _resting = True
    """Whether the servers do not wait for a push of this trainer."""
    share = 0
    _untold = False
    """Whether the servers may lack the schedule's new state."""
    _judge: Judge | None = None

    @property
    def apart(self) -> bool:  # type: ignore[override]
        return not self._parallel.servers.together

    @property
    def pace(self) -> float | None:
        speed = self._pace.speed
        return 1 / speed if speed else None

    def setup(self, task: Task, comm: Comm) -> None:
        if task.optimizer is not None:
            raise ConfigError(OWN_OPTIMIZER, ("strategy",))
        try:
            super().setup(task, comm)
            self._refresh()
        except BaseException:
            self._hang_up()
            raise

    def rejoin(self) -> None:
        self._unbind()
        super().rejoin()

    def let_go(self) -> None:
        self._hang_up()
        self._tables.spool.close()
        super().let_go()

    def pull(self) -> int:
        self._stale = True
        self._refresh()
        return self.version

    def rest(self) -> None:
        """Have the servers not wait for this trainer. Call it after every meeting: then the servers
        expect a push of every trainer again."""
        self._here.rest()
        self._resting = True

    def leave_out(self, lease: Lease) -> None:
        self._here.leave_out(lease)

    def observe(self, value: float) -> None:
        """Pass a validation result to the schedule, and its new state to the servers.

        Every trainer does, because any of them may be lost right now.
        """
        super().observe(value)
        self._untold = True
        self._tell_schedule()

    def rate(self) -> float:
        """Return the learning rate of the last update: the servers' schedule is in the same state
        as this one."""
        return self._numerics.optimizer.lr * self._schedule.factor(max(0, self.version - 1))

    def consumed(self) -> dict[str, Any]:
        return self._here.ledger()

    def unheard(self, version: int) -> list[tuple[int, ...]]:
        return [tuple(record) for record in self._here.records(version)]

    def figures(self) -> dict[str, float]:
        return self._here.figures()

    def state_dict(self) -> dict[str, Any]:
        self._refresh()
        return super().state_dict()

    def spool(self, folder: Path) -> None:
        self._tables.spool.folder = folder

    def healing(self) -> dict[str, Any]:
        """Return what another trainer lacks: all state that the servers do not have."""
        trained = set(map(id, self._parameters))
        named = self.model.state_dict(keep_vars=True)
        return {
            "version": self.version,
            "own": {
                name: value.detach() for name, value in named.items() if id(value) not in trained
            },
            "schedule": self._schedule.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "own" in state:
            self._load_own(state["own"])
        else:
            self._load_whole(state)
        self._schedule.load_state_dict(state["schedule"])
        self._scaler.load_state_dict(state["scaler"])
        self.version = state["version"]
        self._stale, self._untold = True, False

    def _load_own(self, own: dict[str, Tensor]) -> None:
        held = self.model.state_dict()
        for name, value in own.items():
            held[name].copy_(value)

    def _load_whole(self, state: dict[str, Any]) -> None:
        """Load a checkpoint, which all trainers have; the first one uploads it."""
        self._unbind()
        load_weights(self.model, state["model"])
        if self._servers is not None:
            keys = ("version", "optimizer", "schedule", "ledger")
            self._upload(self._weights_only() | {key: state[key] for key in keys if key in state})

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights, at the first trainer with all rows, in a file if `spool` has set
        one."""
        found = super()._weights()
        if self._comm.index:
            return found
        self._tables.begin_cut()
        return found | remote_state(self.model)

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state. Only the first trainer fetches it: one copy is enough."""
        if self._comm.index:
            return {"state": {}, "groups": []}
        found: dict[str, Any] = self._here.state()["optimizer"]
        return found

    def _open_rows(self) -> RowUpdates:
        """Connect the model's tables to the servers, where their rows are made."""
        rows = RowUpdates(self.model)
        section = self._numerics.optimizer if self._task.optimizer is None else None
        self._tables = RemoteTables([table.spec(section) for table in rows.tables])
        for at, table in enumerate(rows.tables):
            table.store = self._tables.store(at)
        return rows

    def _prepare_step(self) -> None:
        """Lay out the parameters; the servers make the steps."""
        flags = penalised(self._numerics.optimizer, self._parameters)
        self._layout = Layout.of(self._names, self._parameters, flags)

    def _meet_members(self) -> None:
        if not self.apart:
            super()._meet_members()
            return
        # Batch norm sees a trainer's own samples, for the others are elsewhere.
        self.shard = Shard(self._comm.index, self._comm.count)
        self._peers = self._comm.collective(device=self._numerics.device)
        self._lockstep = self._meets = False

    def _meet_gradients(self) -> None:
        self._open = False
        self._given = [False] * len(self._parameters)
        found = cast(Reaching, self._comm).directory()
        if found.generation:  # 0 for a newcomer, which prepares before it joins a generation
            self._connect(found)

    def _connect(self, found: Directory) -> None:
        """Connect to the servers and set them up. All members of a generation call it together."""
        if self._servers is None or self._member != found.member:
            self._hang_up()
            self._servers = Servers(
                found.shards,
                found.key,
                found.member,
                plane=self._parallel.servers.plane,
                deadline=found.deadline,
                halted=found.halted,
            )
            self._servers.tables = self._tables
            self._member = found.member
        told = rules(self._numerics, self._parallel, self._tables.specs)
        empty = self._servers.set_up(self._layout, told)
        self._sum = Pushes(self._servers)
        empty_shards, made = self._peers.sum([float(empty), float(self.version)])
        self.lacks_state = empty_shards > 0
        if self.lacks_state and not made:
            self._upload(
                self._weights_only() | {"version": 0, "schedule": self._schedule.state_dict()}
            )
            self._peers.barrier()
        self._judge = self._appoint()
        self._entry = found.generation, found.members
        self._resting = True
        if self.apart and self._numerics.batch:
            pushes = self._parallel.servers.pushes(len(found.members))
            self.share = -(-self._numerics.batch // pushes)
        self._stale = True

    def _upload(self, state: dict[str, Any]) -> None:
        if self._comm.index == 0:
            self._here.upload(state)
        self.lacks_state = False

    def _weights_only(self) -> dict[str, Any]:
        held = zip(self._names, self._parameters, strict=True)
        return {"model": {name: parameter.detach() for name, parameter in held}}

    def _appoint(self) -> Judge | None:
        """Return what measures the merit of this trainer's gradients; None if it is not wanted."""
        section, valid = self._parallel.servers.merit, self._task.valid
        if section.policy == "none":
            return None
        parts = held_out(as_source(valid), self._peers, section.samples, self._numerics.device)
        return Judge(self.model, self._loss_of, self._parameters, parts, section.every)

    def _refresh(self, *, begin: bool = False) -> None:
        """Pull the weights if they may have changed, or if the servers have to know that this
        trainer will `begin` a batch."""
        if self._servers is None or not (self._stale or (begin and self.apart and self._resting)):
            return
        self._servers.enter(*self._entry)  # after an upload the gate has no members
        self._tell_schedule()
        self.version = self._servers.pull(begin=begin)
        self._bind()
        self._stale, self._resting = False, not begin

    def _tell_schedule(self) -> None:
        """Send the schedule's new state, if the servers lack it. After a failure the next call
        sends it again."""
        if self._untold and (state := self._schedule.state_dict()):
            self._here.observe(state)
        self._untold = False

    def _bind(self) -> None:
        weights = self._here.weights
        if self._numerics.device.type != "cpu":
            torch._foreach_copy_([p.detach() for p in self._parameters], weights)
        elif not self._bound:
            for parameter, weight in zip(self._parameters, weights, strict=True):
                parameter.data = weight
            self._bound = True

    def _unbind(self) -> None:
        """Copy the parameters out of the servers' memory, before it goes away."""
        if self._bound:
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()
            self._bound = False

    def _hang_up(self) -> None:
        self._unbind()
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.close()

    @property
    def _here(self) -> Servers:
        if self._servers is None:
            raise PeerError("this member is not connected to the servers")
        return self._servers


class Reaching(Protocol):
    """A `Comm` that knows where the servers are."""

    def directory(self) -> Directory: ...


def rules(numerics: Numerics, parallel: Parallel, tables: Sequence[RowSpec] = ()) -> dict[str, Any]:
    """Return what the servers have to know of a job: plain data, the same from every trainer."""
    section = parallel.servers
    return {
        "optimizer": numerics.optimizer.model_dump(mode="json"),
        "clip": numerics.clip.model_dump(mode="json"),
        "batch": numerics.batch,
        "tables": [table.model_dump(mode="json") for table in tables],
        "staleness": section.staleness,
        "quorum": section.quorum or ("all" if section.together else 1),
        "together": section.together,
        "replicas": section.replicas,
        "live": section.weights == "live",
        "compensate": section.compensate,
        "scale": section.scale,
        "merit": section.merit.policy,
        "balance": parallel.balance,
        **parallel.plan,
    }
