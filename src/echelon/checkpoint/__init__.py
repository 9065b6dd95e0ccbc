"""Consistent cuts of a run: written aside, checksummed, renamed into place."""

from echelon.checkpoint.files import read_cut, verify_cut, write_cut
from echelon.checkpoint.shelf import Shelf
from echelon.checkpoint.writer import Writer

__all__ = ["Shelf", "Writer", "read_cut", "verify_cut", "write_cut"]
