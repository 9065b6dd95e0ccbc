"""Groups of members, their collectives and the sums of their gradients."""

from echelon.comm.collectives import Solo
from echelon.comm.group import Alone, Group
from echelon.comm.interface import Collective, GradientSum, Sums
from echelon.comm.peers import Place

__all__ = ["Alone", "Collective", "GradientSum", "Group", "Place", "Solo", "Sums"]
