"""From a job's data section to sources that are ready to train on."""

from echelon.data.opening.load import Splits, split_rows
from echelon.data.opening.tasks import open_dense, open_language, open_table, open_text

__all__ = ["Splits", "open_dense", "open_language", "open_table", "open_text", "split_rows"]
