"""From a job's data section to sources that are ready to train on."""

from echelon.data.opening.dense import open_dense
from echelon.data.opening.language import open_language
from echelon.data.opening.splits import Splits, split_rows
from echelon.data.opening.table import open_table
from echelon.data.opening.text import open_text

__all__ = ["Splits", "open_dense", "open_language", "open_table", "open_text", "split_rows"]
