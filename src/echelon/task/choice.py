"""Which model a job means."""

from __future__ import annotations

from typing import Any

from echelon.core.config import Job

_USUAL = {"text_classify": "textcnn", "language_model": "gpt", "click_rate": "dlrm"}


def model_choice(job: Job) -> tuple[str, dict[str, Any]]:
    """The model's name, or the usual one of its task, and the options given."""
    values = dict(job.model)
    return values.pop("name", _USUAL.get(job.task, "mlp")), values
