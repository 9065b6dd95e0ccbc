"""Checkpoints: the complete state of a run at one version, saved while training continues.

    state.py     nested state ⇄ named tensors and plain data; the random generators
    files.py     one checkpoint on disk: its files, their checksums, the atomic rename
    store.py     the checkpoints of a run: keeps the last few and the best
    writer.py    saves from a copy in memory, in a thread of its own

Start with store.py. A checkpoint is also called a cut: weights, optimizer, ledger and random state
as of the same version.
"""

from echelon.checkpoint.files import read_cut, verify_cut, write_cut
from echelon.checkpoint.store import Shelf
from echelon.checkpoint.writer import Writer

__all__ = ["Shelf", "Writer", "read_cut", "verify_cut", "write_cut"]
