"""The HTML report of a run: one self-contained file, report.html in the run's folder."""

from __future__ import annotations

from pathlib import Path

from echelon.core.errors import RunError
from echelon.core.files import write_atomic
from echelon.core.format import warn
from echelon.track.report.page import gather, page
from echelon.track.store import Store

REPORT = "report.html"


def write_report(store: Store, run_id: str) -> Path:
    """Write the report of a run into its folder, in place of an earlier one."""
    contents = gather(store, run_id)
    path = contents.run.folder / REPORT
    try:
        write_atomic(path, page(contents))
    except OSError as error:
        raise RunError(f"{path}: the report cannot be written: {error}") from None
    return path


def try_report(store: Store, run_id: str) -> Path | None:
    """Write the report at the end of a run; warn instead of raising."""
    try:
        return write_report(store, run_id)
    except Exception as error:  # any failure: a successful run must not fail because of its report
        warn(f"run {run_id} has no report: {error}")
        return None


__all__ = ["REPORT", "try_report", "write_report"]
