"""Consistent cuts of a run: written aside, checksummed, renamed into place."""

from echelon.checkpoint.files import read_cut, verify_cut, write_cut
from echelon.checkpoint.shelf import Shelf

__all__ = ["Shelf", "read_cut", "verify_cut", "write_cut"]
