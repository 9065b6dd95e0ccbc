"""What every strategy promises, whatever it does inside."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.core.config import ClipSection, OptimizerSection, ScheduleSection
from echelon.core.errors import ConfigError
from echelon.strategy import names

from .jobs import (
    CLASSES,
    FEATURES,
    batches,
    cut,
    data,
    difference,
    mlp,
    steps,
    strategy,
    task,
    weights,
)

pytestmark = pytest.mark.parametrize("name", names())
SGD = OptimizerSection(name="sgd", lr=0.1)


def by_hand(clip: float | None = None) -> dict[str, torch.Tensor]:
    """The trajectory as anybody would write it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()  # type: ignore[arg-type]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return dict(model.state_dict())


def test_ends_on_the_weights_of_a_hand_written_loop(name: str) -> None:
    trained = strategy(name)
    steps(trained, [[batch] for batch in batches()])
    assert difference(weights(trained), by_hand()) <= 1e-5


def test_clipping_is_by_the_global_norm(name: str) -> None:
    trained = strategy(name, clip=ClipSection(norm=0.05))
    steps(trained, [[batch] for batch in batches()])
    assert difference(weights(trained), by_hand(clip=0.05)) <= 1e-5


def test_accumulating_uneven_parts_equals_the_whole_batch(name: str) -> None:
    trained = strategy(name)
    size = [len(batch["y"]) for batch in batches()]
    parts = [[1, n // 2, n - 1 - n // 2] if n > 3 else [n] for n in size]
    steps(trained, [cut(b, p) for b, p in zip(batches(), parts, strict=True)])
    assert difference(weights(trained), by_hand()) <= 1e-5


def test_clipping_by_value_bounds_every_gradient(name: str) -> None:
    trained = strategy(name, optimizer=SGD, clip=ClipSection(value=1e-3))
    before = weights(trained)
    steps(trained, [batches(count=1)])
    largest = max(float((weights(trained)[n] - before[n]).abs().max()) for n in before)
    assert largest == pytest.approx(1e-4, rel=1e-3)  # lr × value


def test_the_schedule_decides_the_rate(name: str) -> None:
    slow = strategy(name, optimizer=SGD, schedule=ScheduleSection(warmup=10))
    full = strategy(name, optimizer=SGD)
    before = weights(slow)
    for trained in (slow, full):
        steps(trained, [batches(count=1)])
    moved = [weights(s)["0.weight"] - before["0.weight"] for s in (slow, full)]
    torch.testing.assert_close(moved[0] * 10, moved[1], rtol=1e-3, atol=1e-6)


def test_going_on_from_saved_state_is_bit_identical(name: str) -> None:
    optimizer = OptimizerSection(name="adamw", lr=0.01, weight_decay=0.1)
    whole, first = strategy(name, optimizer=optimizer), strategy(name, optimizer=optimizer)
    micros = [[batch] for batch in batches()]
    steps(whole, micros)
    steps(first, micros[:11])
    second = strategy(name, optimizer=optimizer)
    second.load_state_dict(first.state_dict())
    steps(second, micros[11:])
    for key, value in weights(whole).items():
        assert torch.equal(value, weights(second)[key]), key
    assert second.state_dict()["version"] == 20


def test_versions_count_updates(name: str) -> None:
    trained = strategy(name)
    for expected in (1, 2, 3):
        trained.compute(batches(count=1))
        update = trained.update()
        assert update.version == expected
        assert update.staleness == 0


def test_evaluating_changes_nothing_and_adds_up_every_sample(name: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        )

    trained = strategy(name, task(model))
    before = weights(trained)
    stats = trained.compute(cut(dict(data()), [50, 53]), backward=False)
    again = trained.compute([dict(data())], backward=False)
    assert stats.weight == 103
    assert float(stats.loss_sum) == pytest.approx(float(again.loss_sum), rel=1e-5)
    assert all(torch.equal(before[n], w) for n, w in weights(trained).items())
    trained.compute(batches(count=1))
    assert trained.model.training, "training goes on in training mode"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_trains_in_half_precision_with_full_precision_weights(name: str, precision: str) -> None:
    trained = strategy(name, precision=precision)
    first = trained.compute([dict(data())], backward=False)
    for batch in batches(count=60):
        trained.compute([batch])
        trained.update()
    last = trained.compute([dict(data())], backward=False)
    assert float(last.loss_sum) < 0.5 * float(first.loss_sum)
    assert all(w.dtype == torch.float32 for w in weights(trained).values())


class Half(nn.Module):
    """Multiplies by a power of two: its gradient overflows in fp16 at a large loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 64.0  # type: ignore[no-any-return]


def test_an_fp16_overflow_is_not_committed_and_is_tried_again_at_a_smaller_scale(name: str) -> None:
    trained = strategy(name, task(Half), precision="fp16")
    before, refusals = weights(trained), 0
    for _ in range(30):
        trained.compute(batches(count=1))
        update = trained.update()
        if update.committed:
            break
        refusals += 1
        assert "loss scale" in update.reason
        assert all(torch.equal(before[n], w) for n, w in weights(trained).items())
    assert update.committed
    assert refusals > 0
    assert update.version == 1


def test_frozen_parameters_stay_and_tied_ones_stay_tied(name: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.frozen = nn.Linear(FEATURES, 8)
            self.frozen.requires_grad_(False)
            self.one = nn.Linear(8, 8)
            self.two = nn.Linear(8, 8)
            self.two.weight = self.one.weight
            self.last = nn.Linear(8, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.two(self.one(self.frozen(x))))  # type: ignore[no-any-return]

    trained = strategy(name, task(Tied))
    before = weights(trained)
    steps(trained, [[batch] for batch in batches(count=3)])
    after = weights(trained)
    assert torch.equal(before["frozen.weight"], after["frozen.weight"])
    assert not torch.equal(before["one.weight"], after["one.weight"])
    assert torch.equal(after["one.weight"], after["two.weight"])
    again = strategy(name, task(Tied))
    again.load_state_dict(trained.state_dict())
    steps(trained, [batches(count=1)])
    steps(again, [batches(count=1)])
    assert difference(weights(again), weights(trained)) == 0


def test_recomputing_activations_gives_the_same_weights(name: str) -> None:
    trained = strategy(name, recompute=True)
    steps(trained, [[batch] for batch in batches()])
    assert difference(weights(trained), by_hand()) <= 1e-5


def test_compiling_gives_the_same_weights_and_names(name: str) -> None:
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        with pytest.raises(ConfigError, match="needs a C"):
            strategy(name, compile=True)
        return
    trained = strategy(name, compile=True)
    steps(trained, [[batch] for batch in batches(size=103, count=3)])
    plain = strategy(name)
    steps(plain, [[batch] for batch in batches(size=103, count=3)])
    assert difference(weights(trained), weights(plain)) <= 1e-5


def test_compiling_without_a_compiler_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="needs a C"):
        strategy(name, compile=True)


def test_a_users_own_optimizer_is_used_unless_servers_have_theirs(name: str) -> None:
    chosen = task()
    chosen.optimizer = lambda parameters: torch.optim.Adadelta(parameters, lr=0.5)
    if name == "parameter_server":
        with pytest.raises(ConfigError, match="it is the servers that apply gradients"):
            strategy(name, chosen)
        return
    trained = strategy(name, chosen)
    before = weights(trained)
    steps(trained, [[batch] for batch in batches(count=3)])
    assert difference(weights(trained), before) > 0
    again = strategy(name, chosen)
    again.load_state_dict(trained.state_dict())
    steps(trained, [batches(count=1)])
    steps(again, [batches(count=1)])
    assert difference(weights(again), weights(trained)) == 0


def test_images_train_as_in_a_hand_written_loop_and_resume_bit_identically(name: str) -> None:
    def cnn() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, CLASSES)
        )

    images = torch.randn(24, 2, 6, 6, generator=torch.Generator().manual_seed(3))
    classes = torch.arange(24) % CLASSES
    adam = OptimizerSection(name="adam", lr=0.01)
    trained, second, model = (
        strategy(name, task(cnn), optimizer=adam),
        strategy(name, task(cnn), optimizer=adam),
        cnn(),
    )
    by_hand = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(8):
        trained.compute([{"x": images, "y": classes}])
        trained.update()
        by_hand.zero_grad()
        F.cross_entropy(model(images), classes).backward()
        by_hand.step()
        if step == 3:
            second.load_state_dict(copy.deepcopy(trained.state_dict()))
    assert difference(weights(trained), dict(model.state_dict())) <= 1e-4
    for _ in range(4):
        second.compute([{"x": images, "y": classes}])
        second.update()
    assert all(torch.equal(w, weights(second)[n]) for n, w in weights(trained).items())


def test_recomputing_moves_batch_statistics_once(name: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        return nn.Sequential(nn.Linear(FEATURES, 8), block, nn.Tanh(), nn.Linear(8, CLASSES))

    found = []
    for recompute in (False, True):
        trained = strategy(name, task(model), recompute=recompute)
        steps(trained, [[batch] for batch in batches(count=3)])
        found.append(weights(trained))
    assert int(found[1]["1.1.num_batches_tracked"]) == 3
    assert difference(found[1], found[0]) <= 1e-6
