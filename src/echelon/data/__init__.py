"""Data: on disk, in memory, in order, and exactly once.

files ── readers ──┬─ opening ── sources ──┐
                   └─ shards ──────────────┴─ loader ── batches
                               order, ledger ──┘
"""

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
