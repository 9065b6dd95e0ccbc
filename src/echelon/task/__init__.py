"""Tasks: what to train. The built-in tasks, tasks from a user's file, losses and metrics.

    loading.py    a job → its Task, checked
    builtin.py    classify, regress, text_classify, language_model, click_rate
    losses.py     losses as (sum, weight) pairs
    metrics.py    metrics as sums over samples

Start with loading.py.
"""

from echelon.task.loading import NAMES, anchored, check, check_python, load_task, prepare

__all__ = ["NAMES", "anchored", "check", "check_python", "load_task", "prepare"]
