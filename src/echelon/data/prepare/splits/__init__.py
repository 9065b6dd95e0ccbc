"""Which split, which shard and which place a record gets, how often it is written, what it weighs.

A few bytes per record go by, several times, and nothing is kept of them but counts: what it takes
does not grow with the records. The same records and seed give the same result.
"""

from echelon.data.prepare.splits.balance import Copies, Weights, train_classes
from echelon.data.prepare.splits.deal import Deal, Dealt, shard_counts
from echelon.data.prepare.splits.divide import By, Division, check_shares, division
from echelon.data.prepare.splits.folds import folding
from echelon.data.prepare.splits.mix import Mixing
from echelon.data.prepare.splits.part import FREE, SPLITS, TEST, TRAIN, Codes, Part, Parts

__all__ = [
    "FREE",
    "SPLITS",
    "TEST",
    "TRAIN",
    "By",
    "Codes",
    "Copies",
    "Deal",
    "Dealt",
    "Division",
    "Mixing",
    "Part",
    "Parts",
    "Weights",
    "check_shares",
    "division",
    "folding",
    "shard_counts",
    "train_classes",
]
