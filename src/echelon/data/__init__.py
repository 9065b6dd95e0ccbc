"""Data: on disk, in memory, in order, and exactly once.

files ── readers ──┬─ opening ── sources ──┐
                   └─ shards ──────────────┴─ loader ── batches
                               order, ledger ──┘

Nothing is imported before it is used: processes that only prepare data do without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.process import lazily

if TYPE_CHECKING:
    from echelon.data.clicks import ClickOptions, make_clicks
    from echelon.data.datasets import DatasetSource
    from echelon.data.draws import PositionDraws
    from echelon.data.intervals import Intervals
    from echelon.data.ledger import Ledger
    from echelon.data.loader import Loader
    from echelon.data.opening import (
        Splits,
        open_dense,
        open_language,
        open_table,
        open_text,
        split_rows,
    )
    from echelon.data.order import Order
    from echelon.data.readers import detect, read
    from echelon.data.readers.images import read_tiles
    from echelon.data.shards import (
        Field,
        Manifest,
        ShardSource,
        read_manifest,
        verify_shards,
        write_shards,
    )
    from echelon.data.sources import ColumnSource, Subset, as_source
    from echelon.data.text import tokenise
    from echelon.data.vocabulary import Vocabulary
    from echelon.data.windows import WindowSource

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
        "clicks": ("ClickOptions", "make_clicks"),
        "datasets": ("DatasetSource",),
        "draws": ("PositionDraws",),
        "intervals": ("Intervals",),
        "ledger": ("Ledger",),
        "loader": ("Loader",),
        "opening": (
            *("Splits", "split_rows"),
            *("open_dense", "open_language", "open_table", "open_text"),
        ),
        "order": ("Order",),
        "readers": ("detect", "read"),
        "readers.images": ("read_tiles",),
        "shards": (
            *("Field", "Manifest", "ShardSource"),
            *("read_manifest", "verify_shards", "write_shards"),
        ),
        "sources": ("ColumnSource", "Subset", "as_source"),
        "text": ("tokenise",),
        "vocabulary": ("Vocabulary",),
        "windows": ("WindowSource",),
    },
)
