"""The user's part: built-in tasks, tasks from files, losses and metrics."""

from echelon.task.idle import check_python
from echelon.task.registry import NAMES, anchored, check, load_task, prepare

__all__ = ["NAMES", "anchored", "check", "check_python", "load_task", "prepare"]
