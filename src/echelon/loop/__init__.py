"""The training loop and what surrounds it in one process: build, drive, recover, resume.

Start with `train.py` (the loop) and `run.py` (what it works on); `driver.py` goes from a job to the
report, and `recovery.py` continues after a member was lost.
"""

from echelon.loop.driver import Result, assist, begin, run_job, take_part
from echelon.loop.known_run import PYTHON_TASK, KnownRun, check_resume, load_run, rearranged

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
