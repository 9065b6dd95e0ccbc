"""Data: on disk, in memory, in order, and exactly once.

files ── readers ──┬─ opening ── sources ──┐
                   └─ shards ──────────────┴─ loader ── batches
                               order, ledger ──┘

Nothing is imported before it is used: processes that only prepare data do without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.data import augment
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
    "augment",
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

_WHERE = {
    "ClickOptions": "clicks",
    "ColumnSource": "sources",
    "DatasetSource": "datasets",
    "Field": "shards",
    "Intervals": "intervals",
    "Ledger": "ledger",
    "Loader": "loader",
    "Manifest": "shards",
    "Order": "order",
    "PositionDraws": "draws",
    "ShardSource": "shards",
    "Splits": "opening",
    "Subset": "sources",
    "Vocabulary": "vocabulary",
    "WindowSource": "windows",
    "as_source": "sources",
    "detect": "readers",
    "make_clicks": "clicks",
    "open_dense": "opening",
    "open_language": "opening",
    "open_table": "opening",
    "open_text": "opening",
    "read": "readers",
    "read_manifest": "shards",
    "read_tiles": "readers.images",
    "split_rows": "opening",
    "tokenise": "text",
    "verify_shards": "shards",
    "write_shards": "shards",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WHERE:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
