"""TensorBoard's own reader finds what the exporter wrote."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from echelon.track import exporter


def test_event_files_can_be_read_back(tmp_path: Path) -> None:
    board = exporter("tensorboard", tmp_path)
    board.started("digits-0001", {"task": "digits", "epochs": 2})
    for step in (50, 100):
        board.logged(step, {"loss": 1 / step, "lr": 0.5})
    board.evaluated(100, {"loss": 0.5, "accuracy": 0.75})
    board.noticed(100, "careful")
    board.finished("done", {"steps": 100})

    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = [(event.step, round(event.value, 4)) for event in found.Scalars("train/loss")]
    assert losses == [(50, 0.02), (100, 0.01)]
    assert [event.value for event in found.Scalars("valid/accuracy")] == [0.75]
    assert [event.value for event in found.Scalars("train/lr")] == [0.5, 0.5]
    texts = {tag.removesuffix("/text_summary") for tag in found.Tags()["tensors"]}
    assert texts == {"run", "notices", "result"}
