"""Consistent cuts of a run: written aside, checksummed, renamed into place."""

from echelon.checkpoint.store import Shelf, read_cut, verify_cut, write_cut
from echelon.checkpoint.writer import Writer

__all__ = ["Shelf", "Writer", "read_cut", "verify_cut", "write_cut"]
