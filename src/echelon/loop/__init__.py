"""The loop, and what stands around it in one process."""

from echelon.loop.open_run import PYTHON_TASK, KnownRun, check_resume, load_run, rearranged
from echelon.loop.result import Result
from echelon.loop.session import assist, run_job
from echelon.loop.taking_part import begin, take_part

__all__ = [
    "PYTHON_TASK",
    "KnownRun",
    "Result",
    "assist",
    "begin",
    "check_resume",
    "load_run",
    "rearranged",
    "run_job",
    "take_part",
]
