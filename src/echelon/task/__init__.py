"""The user's part: built-in tasks, tasks from files, losses and metrics."""

from echelon.task.registry import NAMES, anchored, check, load_task, prepare

__all__ = ["NAMES", "anchored", "check", "load_task", "prepare"]
