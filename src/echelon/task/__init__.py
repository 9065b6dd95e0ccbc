"""The user's part: built-in tasks, tasks from files, losses and metrics."""

from echelon.task.loading import NAMES, anchored, check, check_python, load_task, prepare

__all__ = ["NAMES", "anchored", "check", "check_python", "load_task", "prepare"]
