"""From files to batches of training samples, each consumed exactly once per epoch.

    files ── formats ──┬─ opening ── sources ─┐
                       └─ prepare ── shards ──┴─ loader ── batches
                                 order, ledger ──┘

`formats` reads files. `prepare` runs a recipe over them and writes shards, `opening` carries out
the data section of a job, and `inspect` profiles a file or folder. `order` shuffles, `ledger` hands
out ranges of the order, and `loader` turns these ranges into batches. `journal` records a run, and
`proof` checks afterwards that every sample was consumed once.

Names are imported on first use, because processes that only prepare data do not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.lazy import lazily

if TYPE_CHECKING:
    from echelon.data.formats import detect, read
    from echelon.data.formats.images import read_tiles
    from echelon.data.intervals import Intervals
    from echelon.data.ledger import Ledger
    from echelon.data.loader import Loader, PositionDraws
    from echelon.data.opening import (
        Splits,
        open_dense,
        open_language,
        open_table,
        open_text,
        split_rows,
    )
    from echelon.data.order import Order
    from echelon.data.shards import (
        Field,
        Manifest,
        ShardSource,
        read_manifest,
        verify_shards,
        write_shards,
    )
    from echelon.data.sources import ColumnSource, DatasetSource, Subset, WindowSource, as_source
    from echelon.data.synthetic import ClickOptions, make_clicks
    from echelon.data.text import Vocabulary, tokenise

__all__ = [
    "ClickOptions",
    "ColumnSource",
    "DatasetSource",
    "Field",
    "Intervals",
    "Ledger",
    "Loader",
    "Manifest",
    "Order",
    "PositionDraws",
    "ShardSource",
    "Splits",
    "Subset",
    "Vocabulary",
    "WindowSource",
    "as_source",
    "detect",
    "make_clicks",
    "open_dense",
    "open_language",
    "open_table",
    "open_text",
    "read",
    "read_manifest",
    "read_tiles",
    "split_rows",
    "tokenise",
    "verify_shards",
    "write_shards",
]
__getattr__ = lazily(
    __name__,
    {
        "formats": ("detect", "read"),
        "formats.images": ("read_tiles",),
        "intervals": ("Intervals",),
        "ledger": ("Ledger",),
        "loader": ("PositionDraws", "Loader"),
        "opening": (
            "Splits",
            "split_rows",
            "open_dense",
            "open_language",
            "open_table",
            "open_text",
        ),
        "order": ("Order",),
        "shards": (
            "Field",
            "Manifest",
            "ShardSource",
            "read_manifest",
            "verify_shards",
            "write_shards",
        ),
        "sources": ("DatasetSource", "ColumnSource", "Subset", "as_source", "WindowSource"),
        "synthetic": ("ClickOptions", "make_clicks"),
        "text": ("tokenise", "Vocabulary"),
    },
)
