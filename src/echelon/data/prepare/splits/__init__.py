"""Which split, which shard and which place a record gets, how often it is written, what it weighs.

Pure functions over a few bytes per record. They go through the records in chunks, so what they
need beside their results does not grow with the data; the same keys and seed give the same result.
"""

from echelon.data.prepare.splits.balance import copies, weights
from echelon.data.prepare.splits.deal import Dealt, deal, shard_counts
from echelon.data.prepare.splits.divide import SPLITS, divide

__all__ = ["SPLITS", "Dealt", "copies", "deal", "divide", "shard_counts", "weights"]
