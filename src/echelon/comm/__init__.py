"""How members reach each other."""

from echelon.comm.alone import Alone

__all__ = ["Alone"]
