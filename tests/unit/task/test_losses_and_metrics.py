"""Losses and metrics are sums that match torch and scikit-learn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as reference

from echelon.core.interfaces import Metric
from echelon.core.types import Batch
from echelon.task.losses import binary_cross_entropy, cross_entropy, squared_error
from echelon.task.metrics import AUC, R2, RMSE, Accuracy, Confusion, Hits, Mean, as_metrics


def scores(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def classes(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(4))


def in_parts(metric: object, output: torch.Tensor, y: torch.Tensor) -> float:
    """The metric over uneven batches, added up."""
    totals = [
        metric.measure(output[a:b], {"y": y[a:b]})  # type: ignore[attr-defined]
        for a, b in ((0, 10), (10, 11), (11, len(y)))
    ]
    return float(metric.value(sum(totals[1:], start=totals[0])))  # type: ignore[attr-defined]


def test_samples_with_a_weight_count_that_much() -> None:
    output, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0])
    loss_sum, total = cross_entropy(output, {"y": y, "weight": weight})
    expected = (F.cross_entropy(output, y, reduction="none") * weight).sum()
    torch.testing.assert_close(loss_sum, expected)
    assert float(total) == 3.5
    mixed: Batch = {"y": y, "y2": y, "mix": torch.rand(4), "weight": weight}
    torch.testing.assert_close(cross_entropy(output, mixed)[0], expected)


def test_cross_entropy_is_a_sum_and_a_count() -> None:
    output, y = scores(12, 5), classes(5, 12)
    loss_sum, weight = cross_entropy(output, {"y": y})
    assert weight == 12
    torch.testing.assert_close(loss_sum / weight, F.cross_entropy(output, y))


def test_ignored_tokens_weigh_nothing() -> None:
    output, y = scores(2, 4, 7), classes(7, 2, 4)
    y[0, 1:3] = -100
    loss_sum, weight = cross_entropy(output, {"y": y})
    assert int(weight) == 6
    expected = F.cross_entropy(output.reshape(8, 7), y.reshape(8))
    torch.testing.assert_close(loss_sum / weight, expected)


def test_scores_may_come_wrapped_as_transformers_wrap_them() -> None:
    output, y = scores(4, 3), classes(3, 4)
    wrapped = SimpleNamespace(logits=output)
    assert torch.equal(cross_entropy(wrapped, {"y": y})[0], cross_entropy(output, {"y": y})[0])
    labelled = cross_entropy(output, {"labels": y}, target="labels")
    assert torch.equal(labelled[0], cross_entropy(output, {"y": y})[0])
    with pytest.raises(TypeError, match="the model gave a dict"):
        cross_entropy({}, {"y": y})


def test_blended_samples_are_scored_against_both_targets() -> None:
    output, y, y2 = scores(4, 3), classes(3, 4), classes(3, 8)[4:]
    batch: Batch = {"y": y, "y2": y2, "mix": torch.full((4,), 0.25)}
    loss_sum, _ = cross_entropy(output, batch)
    soft = 0.25 * F.one_hot(y, 3) + 0.75 * F.one_hot(y2, 3)
    torch.testing.assert_close(loss_sum, F.cross_entropy(output, soft, reduction="sum"))


def test_squared_and_binary_losses_match_torch() -> None:
    output, y = scores(9, 1), classes(2, 9).float()
    loss_sum, weight = squared_error(output, {"y": y})
    torch.testing.assert_close(loss_sum / weight, F.mse_loss(output[:, 0], y))
    loss_sum, weight = binary_cross_entropy(output, {"y": y})
    expected = F.binary_cross_entropy_with_logits(output[:, 0], y)
    torch.testing.assert_close(loss_sum / weight, expected)


def test_accuracy_and_top_k() -> None:
    output, y = scores(50, 5), classes(5, 50)
    expected = float((output.argmax(1) == y).float().mean())
    assert in_parts(Accuracy(), output, y) == pytest.approx(expected)
    expected = reference.top_k_accuracy_score(y.numpy(), output.numpy(), k=2, labels=range(5))
    assert in_parts(Accuracy(top=2), output, y) == pytest.approx(expected)


def test_confusion_counts_and_macro_f1() -> None:
    output, y = scores(200, 4), classes(4, 200)
    metric, predicted = Confusion(4), output.argmax(1)
    counts = metric.measure(output, {"y": y})
    assert np.array_equal(counts, reference.confusion_matrix(y, predicted))
    expected = reference.f1_score(y, predicted, average="macro")
    assert in_parts(metric, output, y) == pytest.approx(expected)


def test_auc_matches_the_exact_one() -> None:
    y = classes(2, 5000).float()
    output = scores(5000) + y
    expected = reference.roc_auc_score(y, output)
    assert in_parts(AUC(), output, y) == pytest.approx(expected, abs=2e-4)
    assert np.isnan(in_parts(AUC(), output, torch.ones(5000)))


def test_hits_rmse_and_r2() -> None:
    y = classes(2, 60).float()
    output = scores(60) + y
    assert in_parts(Hits(), output, y) == pytest.approx(
        float(((output > 0) == (y > 0.5)).float().mean())
    )
    assert in_parts(RMSE(), output, y) == pytest.approx(
        float(F.mse_loss(output, y).sqrt()), rel=1e-5
    )
    assert in_parts(R2(), output, y) == pytest.approx(reference.r2_score(y, output), rel=1e-5)


def test_a_plain_function_becomes_a_mean_over_samples() -> None:
    output, y = scores(30, 3), classes(3, 30)
    found = as_metrics({"nll": cross_entropy, "accuracy": Accuracy()})
    assert isinstance(found["nll"], Mean)
    assert isinstance(found["accuracy"], Accuracy)
    assert in_parts(found["nll"], output, y) == pytest.approx(float(F.cross_entropy(output, y)))


def test_whole_numbers_are_targets_too() -> None:
    output, y = scores(9, 1), classes(2, 9)
    for loss in (squared_error, binary_cross_entropy):
        assert torch.equal(loss(output, {"y": y})[0], loss(output, {"y": y.float()})[0])


def test_targets_that_do_not_count_are_left_out_of_the_metrics() -> None:
    output, y = scores(3, 20, 4), classes(4, 3, 20)
    y[1, 5:] = -100
    kept = y != -100
    for metric in (Accuracy(), Accuracy(top=2), Confusion(4)):
        found = metric.measure(output, {"y": y})
        assert torch.equal(found, metric.measure(output[kept], {"y": y[kept]}))


@pytest.mark.parametrize(
    "metric", [Accuracy(), Accuracy(top=2), Hits(), RMSE(), R2(), Mean(cross_entropy)]
)
def test_totals_are_made_where_the_output_is(metric: Metric) -> None:
    # "meta" stands in for a GPU: torch refuses to stack what lies on two devices.
    single = isinstance(metric, Hits | RMSE | R2)
    output = torch.empty((6, 1) if single else (6, 3), device="meta")
    total = metric.measure(output, {"y": torch.zeros(6, dtype=torch.long, device="meta")})
    assert total.device.type == "meta"
    assert total.dtype == torch.double
