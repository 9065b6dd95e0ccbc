"""The loop, and what stands around it in one process."""

from echelon.loop.open_run import PYTHON_TASK, KnownRun, check_resume, load_run, rearranged
from echelon.loop.result import Result
from echelon.loop.session import assist, run_job

__all__ = [
    "PYTHON_TASK",
    "KnownRun",
    "Result",
    "assist",
    "check_resume",
    "load_run",
    "rearranged",
    "run_job",
]
