"""A step calls fused kernels directly if the result is the same, and only then."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from echelon.core.config import OptimizerSection
from echelon.core.errors import TaskError
from echelon.optim import Stepper, build_optimizer

FUSED = ["sgd", "momentum", "nesterov", "adagrad", "adam", "adamw"]


class Counted:
    """A model, its stepper, and how often torch's own step ran."""

    def __init__(self, name: str, model: nn.Module | None = None, **values: Any) -> None:
        torch.manual_seed(2)
        self.model = model or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        section = OptimizerSection.model_validate({"name": name, "lr": 0.1, **values})
        self.optimizer = build_optimizer(section, self.model)
        self.stepper = Stepper(self.optimizer, self.model.named_parameters())

    def step(self, factor: float = 1.0, skip: tuple[str, ...] = ()) -> bool:
        """One step on given gradients; whether it went through torch's optimizer."""
        generator = torch.Generator().manual_seed(4)
        for name, p in self.model.named_parameters():
            gradient = torch.randn(p.shape, generator=generator)
            p.grad = None if name in skip else gradient
        calls: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            kind = type(self.optimizer)
            original = kind.step

            def counting(optimizer: torch.optim.Optimizer) -> None:
                calls.append(kind.__name__)
                original(optimizer)

            patch.setattr(kind, "step", counting)
            self.stepper.step(factor)
        return bool(calls)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.parametrize("name", FUSED)
def test_after_the_first_step_torchs_python_is_skipped(name: str) -> None:
    run = Counted(name)
    first, *later = [run.step() for _ in range(3)]
    assert first == (name not in ("sgd", "adagrad"))  # these two have their state from the start
    assert later == [False, False]


def test_an_optimizer_without_fused_kernel_is_stepped_by_torch() -> None:
    run = Counted("rmsprop")
    assert [run.step() for _ in range(2)] == [True, True]


def test_the_learning_rate_of_a_group_is_the_current_one() -> None:
    run = Counted("adam", weight_decay=0.1)
    for factor in (0.5, 0.25):
        run.step(factor)
        assert [g["lr"] for g in run.optimizer.param_groups] == [0.1 * factor] * 2
        assert [g["initial_lr"] for g in run.optimizer.param_groups] == [0.1] * 2


@pytest.mark.parametrize("name", [*FUSED, "rmsprop"])
def test_a_missing_gradient_skips_that_parameter_only(name: str) -> None:
    run = Counted(name)
    run.step()
    before = run.weights()
    assert run.step(skip=("0.bias",))
    moved = [not torch.equal(a, b) for a, b in zip(before, run.weights(), strict=True)]
    assert moved == [True, False, True, True]
    assert run.step() == (name == "rmsprop")


@pytest.mark.parametrize("name", FUSED)
def test_a_parameter_may_get_its_first_gradient_late(name: str) -> None:
    run = Counted(name)
    run.step(skip=("1.weight", "1.bias"))
    run.step()
    run.step()
    alone = Counted(name)
    alone.step(skip=("0.weight", "0.bias"))
    alone.step(skip=("0.weight", "0.bias"))
    for late, expected in zip(run.weights()[2:], alone.weights()[2:], strict=True):
        assert torch.equal(late, expected)


def test_hooks_are_called() -> None:
    run = Counted("adam")
    run.step()
    calls: list[str] = []
    local = run.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    after = run.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert run.step()
    assert calls == ["before", "after"]
    local.remove()
    after.remove()
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    try:
        assert run.step()
    finally:
        everywhere.remove()
    assert calls[2:] == ["global"]
    assert not run.step()


def test_a_wrapped_step_is_respected() -> None:
    run = Counted("sgd")
    assert not run.step()
    calls: list[str] = []
    original = run.optimizer.step

    def wrapped() -> None:
        calls.append("wrapped")
        original()

    run.optimizer.step = wrapped  # type: ignore[method-assign, assignment]
    run.step()
    assert calls == ["wrapped"]


def test_a_group_added_in_mid_run_is_trained_too() -> None:
    run = Counted("adam")
    run.step()
    extra = nn.Parameter(torch.ones(3))
    run.model.register_parameter("extra", extra)
    run.optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert run.step()
    assert not torch.equal(extra.detach(), torch.ones(3))
    assert run.optimizer.param_groups[1]["lr"] == 0.5
    assert not run.step()


def test_parameters_exchanged_in_mid_run_are_seen() -> None:
    run = Counted("momentum")
    run.step()
    fresh = nn.Parameter(torch.ones(4, 3))
    linear = run.model.get_submodule("0")
    linear.weight = fresh
    run.optimizer.param_groups[0]["params"][0] = fresh
    assert run.step()
    assert not torch.equal(fresh.detach(), torch.ones(4, 3))
    run.optimizer.param_groups[0]["params"].pop()
    assert run.step()


def test_state_loaded_through_torch_is_seen() -> None:
    run, other = Counted("adam"), Counted("adam")
    for _ in range(2):
        run.step()
        other.step()
    run.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    run.step()
    other.step()
    assert run.optimizer.state[run.model.get_parameter("0.weight")]["step"] == 3
    for mine, reference in zip(run.weights(), other.weights(), strict=True):
        assert torch.equal(mine, reference)


def test_a_state_that_was_replaced_is_seen() -> None:
    run = Counted("adam")
    run.step()
    run.optimizer.state = defaultdict(dict)
    assert run.step()
    assert run.optimizer.state[run.model.get_parameter("0.weight")]["step"] == 1


class Halving(torch.optim.SGD):
    """An optimizer of the user's own, with the name of a base we know."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)


def test_a_subclass_runs_its_own_step() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    stepper = Stepper(Halving(model.parameters(), fused=True), model.named_parameters())
    for _ in range(2):
        stepper.step(1.0)
    assert torch.equal(model.weight.detach(), before / 4)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_users_own_adam_keeps_all_its_options(kind: Any, amsgrad: bool) -> None:
    torch.manual_seed(0)
    ours = nn.Linear(4, 3)
    theirs = nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 0.1, "weight_decay": 0.2, "amsgrad": amsgrad, "maximize": True, "fused": True}
    stepper = Stepper(kind(ours.parameters(), **options), ours.named_parameters())
    reference = kind(theirs.parameters(), **options)
    for seed in range(4):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(seed))
            other.grad = mine.grad.clone()
        stepper.step(1.0)
        reference.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_a_rate_kept_in_a_tensor_is_scaled_in_place() -> None:
    model = nn.Linear(2, 1)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    stepper = Stepper(optimizer, model.named_parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for factor in (0.5, 0.25):
        stepper.step(factor)
        assert optimizer.param_groups[0]["lr"] is rate
        assert float(rate) == 0.5 * factor


def test_parameters_of_two_dtypes_take_a_kernel_call_each() -> None:
    model = nn.Sequential(nn.Linear(3, 4).double(), nn.Linear(4, 2))
    run = Counted("adam", model)
    other = Counted("adam", nn.Sequential(nn.Linear(3, 4).double(), nn.Linear(4, 2)))
    other.model.load_state_dict(model.state_dict())
    for net in (run.model, other.model):
        for p in net.parameters():
            p.grad = torch.full_like(p, 0.5)
    for _ in range(3):
        run.stepper.step(1.0)
        other.optimizer.step()
    for mine, reference in zip(run.weights(), other.weights(), strict=True):
        assert torch.equal(mine, reference)


def test_grad_mode_is_as_it_was() -> None:
    run = Counted("sgd")
    run.step()
    assert torch.is_grad_enabled()
    with torch.no_grad():
        run.step()
        assert not torch.is_grad_enabled()


def test_switching_momentum_off_in_mid_run_is_refused() -> None:
    run = Counted("momentum")
    run.step()
    run.optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(AssertionError, match="momentum was switched"):
        run.step()


def test_a_parameter_without_a_name_is_refused() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(5))])
    with pytest.raises(TaskError, match=r"holds a parameter \(5,\) that has no name"):
        Stepper(optimizer, model.named_parameters())


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(TaskError, match="LBFGS"):
        Stepper(torch.optim.LBFGS(model.parameters()), model.named_parameters())


def test_training_does_not_import_torchs_compiler() -> None:
    script = (
        "import sys, torch\n"
        "from echelon.core.config import OptimizerSection\n"
        "from echelon.optim import Stepper, build_optimizer, spare_compiler\n"
        "spare_compiler()\n"
        "for name in ('sgd', 'momentum', 'adagrad', 'rmsprop', 'adam', 'adamw'):\n"
        "    model = torch.nn.Linear(3, 2)\n"
        "    stepper = Stepper(build_optimizer(OptimizerSection(name=name), model),"
        " model.named_parameters())\n"
        "    for _ in range(3):\n"
        "        model(torch.ones(4, 3)).sum().backward()\n"
        "        stepper.step(1.0)\n"
        "    stepper.load_state_dict(stepper.state_dict())\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
