"""From a job's data section to sources that are ready to train on.

    locate ─▶ parts (files) ─ load ─▶ Origin (frames) ─ tasks ─▶ Splits (sources, fitted, about)

One function of `tasks` serves each kind of data: dense, text, language, table. `frame` has the
columns that they work on, `locate` finds the training part and the held-out part, `load` reads them
with the strict readers of `data.formats`. `prepared` opens data that a recipe has prepared; it is
imported separately, because recipes take a while to import.
"""

from echelon.data.opening.load import Splits, split_rows
from echelon.data.opening.tasks import open_dense, open_language, open_table, open_text

__all__ = ["Splits", "open_dense", "open_language", "open_table", "open_text", "split_rows"]
