"""The coordinator: who takes part, in which generation, at which version, and who does what.

    member ── Liaison ──┐                  ┌─ roster, liveness     who is there
    member ── Liaison ──┼── TCP ── server ─┤  generations          who trains together
    supervisor ─ Reporter ┘        desk ───┤  versions, leases     what is on record, who holds what
                                           └─ outbox ── journal    what a successor has to know

Everything but the sockets is plain code that is told what time it is. No gradient passes here.
"""

from echelon.cluster.coordinator.client import About, Fellow, Generation, Liaison
from echelon.cluster.coordinator.effects import Settings
from echelon.cluster.coordinator.protocol import join_string, read_join_string
from echelon.cluster.coordinator.server import serve
from echelon.cluster.coordinator.session import Reporter

__all__ = [
    "About",
    "Fellow",
    "Generation",
    "Liaison",
    "Reporter",
    "Settings",
    "join_string",
    "read_join_string",
    "serve",
]
