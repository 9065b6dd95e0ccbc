"""Runs under faults: what is to go wrong, bringing it about, and what came of it.

plan, chance    faults as text, or made from a seed
process         `echelon train` as a real process, with all that it starts
scene           the run as its journal shows it
actuators       kill, freeze, slow, partition, join, fill, tear
controller      follows the run and does what is due
measure, trial  noticed after, mended after; the ledger's verdict; what is left behind
"""

from echelon.cluster.chaos.plan import Fault, PlanError, random_plan, read_plan
from echelon.cluster.chaos.run import endure

__all__ = ["Fault", "PlanError", "endure", "random_plan", "read_plan"]
