"""How members reach each other."""

from echelon.comm.alone import Alone
from echelon.comm.group import Group
from echelon.comm.interface import Collective, GradientSum, Sums
from echelon.comm.place import Place
from echelon.comm.solo import Solo

__all__ = ["Alone", "Collective", "GradientSum", "Group", "Place", "Solo", "Sums"]
