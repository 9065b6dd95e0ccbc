"""Tensor parallel."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.comm.buckets import square_sum
from echelon.comm.interface import Collective
from echelon.core.config.sections import Cut as How
from echelon.core.errors import CheckpointError, ConfigError, unknown
from echelon.core.interfaces import Comm, Inspector, Task
from echelon.core.types import Shard
from echelon.data.batch import to_device
from echelon.models.gpt import Attention, FeedForward
from echelon.models.mlp import MLP
from echelon.optim import gradients
from echelon.strategy.all_reduce import AllReduce, make_alike
from echelon.strategy.base import Met, as_factory
from echelon.strategy.batch_norm import synchronise, unsynchronise
from echelon.strategy.diagnose import agree, blame, explain_together
from echelon.strategy.optimizer_shards import check_divisible, lengths, own_state, whole_state

# --- strategy ---
# The members of a team compute the planned layers together; teams share the batch among them.
#
# data axis     team 0: members 0 1 │ team 1: members 2 3
# gradients     summed between 0 and 2, and between 1 and 3: those that hold the same parts


class TensorParallel(AllReduce):
    """All_reduce between teams. One member alone has nothing to cut."""

    alone = False

    def setup(self, task: Task, comm: Comm) -> None:
        super().setup(task if comm.count == 1 else as_factory(task), comm)

    def _place(self) -> None:
        device, comm = self._numerics.device, self._comm
        data, along = lengths(self._parallel, "tensor", comm.count)
        team, place = divmod(comm.index, along)
        self.shard = Shard(team, data)
        self._everybody: Collective = comm.collective(device=device)
        make_alike(self.model, self._everybody, self._parallel.sync.skip_init)
        self._peers = comm.collective(range(place, comm.count, along), device=device)
        self._team = comm.collective(range(team * along, (team + 1) * along), device=device)
        self._meet_in_layers()
        self._cuts: list[Cut] = self._cut() if along > 1 else []
        self.whole = not self._cuts

    def _cut(self) -> list[Cut]:
        if self._numerics.compile:
            raise ConfigError(
                "compile: true has no effect on layers that several members compute together: "
                "leave it out with strategy tensor",
                ("compile",),
            )
        chance = agree_on_chance(self._team, self._numerics.device)
        team, wishes = Team(self._team, chance), self._parallel.tensor.plan
        if not wishes:
            return cut_model(self.model, planned(self.model, wishes), team)
        with unchanged(self._task, self.model, self._numerics.device):
            return cut_model(self.model, planned(self.model, wishes), team)

    def _join(self) -> None:
        if self._cuts:
            check_divisible(self._stepper.optimizer)
        super()._join()
        names = {cut.name for cut in self._cuts}
        self._is_cut = [name in names for name in self._names]

    def size(self) -> int:
        wholes = {cut.name: cut.shape.numel() for cut in self._cuts}
        return sum(wholes.get(name, p.numel()) for name, p in self.model.named_parameters())

    def _meet(self) -> Met:
        met = super()._meet()
        bad = not (met.finite and math.isfinite(met.loss_sum))
        others_bad, asked = self._team.sum([float(bad), met.asked])
        return met._replace(finite=others_bad == 0, asked=int(asked))

    def _clip(self) -> None:
        clip = self._numerics.clip
        if clip.norm is None:
            super()._clip()
        elif (factor := gradients.clip_factor(self._norm(), clip.norm)) < 1:
            if self._own is None:
                self._sum.scale_(factor)
            else:
                torch._foreach_mul_(self._own, factor)

    def _norm(self) -> float:
        """Parts are added up over the team, what all of it has is counted once."""
        pairs = [(p.grad, cut) for p, cut in zip(self._parameters, self._is_cut, strict=True)]
        parts = [grad for grad, cut in pairs if cut and grad is not None]
        alike = [grad for grad, cut in pairs if not cut and grad is not None]
        once = square_sum(alike) if self._team.index == 0 else 0.0
        return math.sqrt(self._team.sum([square_sum(parts) + once])[0])

    def _inspect(self, inspector: Inspector) -> None:
        """A single value, the norm of the whole, stands for tensors that lie in parts."""
        held = [
            (name, cut, p.detach(), p.grad)
            for name, cut, p in zip(self._names, self._is_cut, self._parameters, strict=True)
            if p.grad is not None
        ]
        names = [name for name, *_ in held]
        weights = self._norms([(cut, weight) for _, cut, weight, _ in held])
        grads = self._norms([(cut, grad) for _, cut, _, grad in held])
        weights_by_name = dict(zip(names, weights, strict=True))
        inspector.inspect(self.version + 1, weights_by_name, dict(zip(names, grads, strict=True)))

    def _norms(self, held: Sequence[tuple[bool, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        mine = [square_sum([t]) if cut or self._team.index == 0 else 0.0 for cut, t in held]
        squares = torch.tensor(mine, dtype=torch.float64)
        self._team.sum_(squares)
        norms: tuple[torch.Tensor, ...] = squares.sqrt_().split(1)
        return norms

    def _explain(self) -> str:
        """Looked into by each team alone, so without layers that wait for other teams."""
        unsynchronise(self.model)
        words = explain_together(
            self.model, self._forward, self._micro, self._loss_sum, self.version, self._spoilt()
        )
        if self._lockstep:
            synchronise(self.model, self._peers, always=True)
        return agree(self._everybody, words, blame(self._micro, self._loss_sum))

    def _spoilt(self) -> list[str]:
        """Parameters with a gradient that is not finite in any member."""
        grads = [p.grad for p in self._parameters]
        found = [grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads]
        counts = torch.tensor(found, dtype=torch.int64)
        self._everybody.sum_(counts)
        return [name for name, bad in zip(self._names, counts.tolist(), strict=True) if bad]

    def _weights(self) -> dict[str, torch.Tensor]:
        weights = super()._weights()
        parts = [weights[cut.name] for cut in self._cuts]
        wholes = gathered(self._cuts, parts, self._team)
        return weights | {cut.name: whole for cut, whole in zip(self._cuts, wholes, strict=True)}

    def _load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        fitting = [cut for cut in self._cuts if cut.name in weights]
        index = self._team.index
        parts = {cut.name: cut.cut(weights[cut.name], index, what=cut.name) for cut in fitting}
        super()._load_weights(weights | parts)

    def _optimizer_state(self) -> dict[str, Any]:
        return whole_state(super()._optimizer_state(), self._cuts, self._team, gathered)

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        super()._load_optimizer_state(own_state(state, self._cuts, self._team.index))

    def let_go(self) -> None:
        restore(self.model)
        super().let_go()


# --- chance ---
# The random numbers of a team: alike where all have the same activations, else one's own.


@dataclass(slots=True)
class Chance:
    """`generator` draws alike in all members, but for what is between `part` and `join`."""

    generator: torch.Generator
    index: int
    _common: Tensor | None = None

    def part(self) -> None:
        """Go on with numbers of one's own. They follow from the common ones, so a forward pass
        that is made again (recompute) draws the same."""
        drawn = torch.randint(1 << 40, (), generator=self.generator, device=self.generator.device)
        self._common = self.generator.get_state()
        self.generator.manual_seed(int(drawn) + 1 + self.index)

    def join(self) -> None:
        """Go on with the common ones."""
        if self._common is not None:
            self.generator.set_state(self._common)
            self._common = None


def agree_on_chance(team: Collective, device: torch.device) -> Chance:
    """Let the team's members draw alike from now on."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    else:
        generator = torch.default_generator
    state = generator.get_state().to(device)
    team.broadcast_([state])
    generator.set_state(state.cpu())
    return Chance(generator, team.index)


# --- layers ---
# Linear layers of which every member of a team computes a part (Shoeybi et al. 2019).
#
#     x ──▶ columns ──▶ own outputs ─ elementwise ─▶ rows ──▶ Σ over the team ──▶ y
#     Σ over the team ◀── dx                                              dy ◀── the same for all
#
# Dropout between them draws numbers of each member's own, everywhere else the same ones for all.


@dataclass(frozen=True, slots=True)
class Team:
    """Those that compute a layer together."""

    group: Collective
    chance: Chance


def cut_columns(layer: nn.Linear, team: Team, *, first: bool) -> None:
    """Its weight and bias hold the outputs of this member alone. `first`: of its group."""
    # Patched rather than replaced: names and the user's own module stay what they are.
    layer.forward = functools.partial(_columns, layer, team, first)  # type: ignore[method-assign]


def cut_rows(layer: nn.Linear, team: Team) -> None:
    """Its weight holds what belongs to this member's inputs; its bias is whole."""
    layer.forward = functools.partial(_rows, layer, team)  # type: ignore[method-assign]


def restore(model: nn.Module) -> None:
    """Take the patches off. What the layers hold stays a part."""
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if isinstance(patched, functools.partial) and patched.func in (_columns, _rows):
            del module.__dict__["forward"]


def _columns(layer: nn.Linear, team: Team, first: bool, x: Tensor) -> Tensor:
    alike: Tensor = _SumBackward.apply(x, team.group)  # type: ignore[no-untyped-call]
    y = F.linear(alike, layer.weight, layer.bias)
    if layer.training and first:
        team.chance.part()
    return y


def _rows(layer: nn.Linear, team: Team, x: Tensor) -> Tensor:
    if layer.training:
        team.chance.join()
    part = F.linear(x, layer.weight)
    y: Tensor = _SumForward.apply(part, team.group)  # type: ignore[no-untyped-call]
    return y if layer.bias is None else y + layer.bias


class _SumBackward(torch.autograd.Function):
    """What all have alike goes different ways: gradients come back from all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _SumForward(torch.autograd.Function):
    """Every member has a summand; the gradient of a sum is that of each summand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:  # noqa: ARG004 (torch's way)
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


def _summed(x: Tensor, group: Collective) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.sum_(total)
    return total


# --- cutting ---
# Take from a whole model what belongs to one member of a team.


def cut_model(model: nn.Module, plan: Plan, team: Team) -> list[Cut]:
    """Cut the planned layers in place; returns what was cut."""
    count = team.group.count
    _refuse_tied(model, plan)
    cuts: list[Cut] = []
    before = "rows"
    for name, how in plan.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        size = layer.out_features if how == "columns" else layer.in_features
        if size < count:
            raise ConfigError(
                f"layer {name!r} cannot be cut by {how} into {count} parts: it has {size}",
                ("tensor", "plan"),
            )
        places = _places(model, name, size, count)
        cuts.append(_cut(layer, f"{name}.weight", 0 if how == "columns" else 1, places, team))
        if how == "columns" and layer.bias is not None:
            cuts.append(_cut(layer, f"{name}.bias", 0, places, team))
        if how == "columns":
            cut_columns(layer, team, first=before == "rows")
        else:
            cut_rows(layer, team)
        before = how
    return cuts


def _places(model: nn.Module, name: str, size: int, count: int) -> tuple[Tensor, ...]:
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if not isinstance(owner, Attention):
        return even(size, count)
    if owner.heads % count:
        raise ConfigError(
            f"model.heads = {owner.heads}: must be a multiple of the {count} members that share "
            f"a layer",
            ("model", "heads"),
        )
    parts = 3 if child == "qkv" else 1
    return by_heads(size // parts, owner.heads, parts, count)


@torch.no_grad()
def _cut(layer: nn.Linear, name: str, dim: int, places: tuple[Tensor, ...], team: Team) -> Cut:
    kind = name.rpartition(".")[2]
    whole: nn.Parameter = getattr(layer, kind)
    cut = Cut(name, whole.shape, dim, places)
    part = cut.cut(whole, team.group.index, what=name)
    setattr(layer, kind, nn.Parameter(part, requires_grad=whole.requires_grad))
    return cut


def _refuse_tied(model: nn.Module, plan: Plan) -> None:
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in plan:
        if any(uses[p] > 1 for p in model.get_submodule(name).parameters()):
            raise ConfigError(
                f"tensor.plan: layer {name!r} shares a parameter with another: it cannot be cut",
                ("tensor", "plan"),
            )


# --- cuts ---
# Which rows or columns of a matrix are whose.


@dataclass(frozen=True, slots=True)
class Cut:
    """One parameter, divided along `dim`; `places[i]` is where the parts of member i belong."""

    name: str
    shape: torch.Size
    dim: int
    places: tuple[Tensor, ...]

    def cut(self, whole: Tensor, index: int, *, what: str) -> Tensor:
        """The part of a whole that belongs to member `index`."""
        if whole.shape != self.shape:
            raise CheckpointError(
                f"{what} is {tuple(whole.shape)}, but the parameter is {tuple(self.shape)}"
            )
        return whole.detach().index_select(self.dim, self.places[index].to(whole.device))


def even(size: int, count: int) -> tuple[Tensor, ...]:
    """Neighbours stay together; parts differ by one at most."""
    edges = [size * at // count for at in range(count + 1)]
    return tuple(torch.arange(*edges[at : at + 2]) for at in range(count))


def by_heads(width: int, heads: int, parts: int, count: int) -> tuple[Tensor, ...]:
    """Rows of `parts` matrices one below the other, each laid out by heads."""
    rows = torch.arange(parts * width).view(parts, heads, width // heads)
    return tuple(rows[:, chosen].flatten() for chosen in even(heads, count))


def gathered(cuts: Sequence[Cut], parts: Sequence[Tensor], team: Collective) -> Iterator[Tensor]:
    """The wholes that `parts` are of, one after the other; called by the whole team."""
    for cut, part in zip(cuts, parts, strict=True):
        whole = part.new_empty(cut.shape)
        for source, places in enumerate(cut.places):
            shape = list(cut.shape)
            shape[cut.dim] = len(places)
            piece = part.contiguous() if source == team.index else part.new_empty(shape)
            team.broadcast_([piece], source)
            whole.index_copy_(cut.dim, places.to(whole.device), piece)
        yield whole


# --- plan ---
# Which linear layers are cut, and how: derived for models that are known, else the user's word.
#
# Layers come in groups: some that are cut by columns, then one that is cut by rows and so brings
# the parts together again. What lies between them has to treat every value by itself.

Plan = dict[str, How]
_PATH = ("tensor", "plan")
_ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Dropout,
    nn.Identity,
)


def planned(model: nn.Module, wishes: Mapping[str, How]) -> Plan:
    """Layer name → how it is cut, in the order of the model."""
    plan = _chosen(model, wishes) if wishes else _derived(model)
    if not plan:
        raise ConfigError(
            "strategy tensor does not know how to cut this model: say it in tensor.plan, layer by "
            "layer: columns or rows (known: gpt, and mlp without norm)",
            _PATH,
        )
    _check_order(plan)
    return plan


def _chosen(model: nn.Module, wishes: Mapping[str, How]) -> Plan:
    layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    for pattern in wishes:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ConfigError(
                unknown("tensor.plan: linear layer", pattern, layers), (*_PATH, pattern)
            )
    found = {name: [wishes[p] for p in wishes if fnmatchcase(name, p)] for name in layers}
    return {name: hows[0] for name, hows in found.items() if hows}


def _derived(model: nn.Module) -> Plan:
    plan: Plan = {}
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, Attention):
            plan |= {f"{prefix}qkv": "columns", f"{prefix}out": "rows"}
        elif isinstance(part, FeedForward):
            plan |= {f"{prefix}up": "columns", f"{prefix}out": "rows"}
        elif isinstance(part, MLP):
            plan |= {f"{prefix}{layer}": how for layer, how in _of_mlp(part)}
    return plan


def _of_mlp(model: MLP) -> Iterator[tuple[str, How]]:
    """Pairs of neighbours with nothing but elementwise layers between them."""
    waiting: str | None = None
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            if waiting is not None:
                yield waiting, "columns"
                yield name, "rows"
            waiting = name if waiting is None else None
        elif not isinstance(part, (*_ELEMENTWISE, nn.Sequential)):
            waiting = None


def _check_order(plan: Plan) -> None:
    """Parts that are made have to be brought together; what is brought together has to be made."""
    open_since: str | None = None
    for name, how in plan.items():
        if how == "columns":
            open_since = name
        elif open_since is None:
            raise ConfigError(
                f"tensor.plan: {name!r} is cut by rows, but no layer before it by columns", _PATH
            )
        else:
            open_since = None
    if open_since is not None:
        raise ConfigError(
            f"tensor.plan: {open_since!r} is cut by columns, but no layer after it by rows", _PATH
        )


# --- check ---
# Whether a model that was cut as the user says still computes what the whole one did.
#
# A plan that cuts around something that looks at a whole row (a norm, a softmax) would train, and
# train something else.

SAMPLES = 4
_CLOSE = 1e-3


@contextmanager
def unchanged(task: Task, model: nn.Module, device: torch.device) -> Iterator[None]:
    """What `model` gives for a few samples must be the same before and after."""
    if task.train is None or not len(task.train):
        yield
        return
    rows = torch.arange(min(SAMPLES, len(task.train)))
    batch = to_device(task.train.gather(rows), device)
    before = _given(model, lambda: task.forward(model, batch))
    yield
    try:
        after = _given(model, lambda: task.forward(model, batch))
    except RuntimeError as error:
        raise _refused(str(error).partition("\n")[0]) from None
    if len(before) != len(after) or not all(map(_close, before, after)):
        raise _refused("the model then gives something else")


def _given(model: nn.Module, forward: Callable[[], Any]) -> list[Tensor]:
    """With the same random numbers each time; no layer learns or counts."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(0)
            found = forward()
    finally:
        model.train(training)
    return [leaf.clone() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() or not one.numel():
        return True
    near = max(_CLOSE, 16 * torch.finfo(one.dtype).eps)
    apart = (one - other).abs().max() / one.abs().max().clamp(min=1e-12)
    return not bool(apart > near)  # what is not finite is another matter


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"tensor.plan does not fit the model: {why}; between layers cut by columns and the one cut "
        f"by rows, every value has to be treated by itself",
        ("tensor", "plan"),
    )
