"""The loop, and what stands around it in one process."""

from echelon.loop.driver import Result, assist, begin, run_job, take_part
from echelon.loop.inference import PYTHON_TASK, KnownRun, check_resume, load_run, rearranged

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
