"""`echelon chaos`: runs under injected faults, and whether they recover.

Each trial starts `echelon train` as a real process, follows the run's journal, injects the faults
of a plan when their steps come, and checks the result: exactly once, the same weights as without
faults, nothing left behind. In reading order:

    plan     faults as text, or random faults from a seed
    run      `endure`: a run without faults, then one trial per seed, and the report
    trial    one run under a plan: follow it, inject what is due, conclude
    view     the run under test: its processes, its state as the journal shows it, its faults
    faults   how each fault is injected: kill, freeze, slow, partition, join, fill, tear
    measure  seconds to detection and to recovery, and the difference of the weights
"""

from echelon.cluster.chaos.plan import Fault, PlanError, random_plan, read_plan
from echelon.cluster.chaos.run import endure

__all__ = ["Fault", "PlanError", "endure", "random_plan", "read_plan"]
