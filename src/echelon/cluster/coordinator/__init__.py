"""The coordinator of an elastic run: who takes part, who trains together, and what is done.

    member ──── Liaison ──┐                      ┌─ Roster, Liveness   who is there
    member ──── Liaison ──┼─ TCP ─ Server ─ Desk ┼─ Generations        who trains together
    chaos ───── Reporter ─┘          │           ├─ Versions           which updates are journaled
                                     │           └─ Leases             who holds which samples
                                     └─ Post ── journal                what a successor has to know

No gradient passes here. The idea is a pure core in a thin shell. `Desk` and its parts have no
socket, file, thread or clock. Messages and the time go in; effects come out through `Outbox`: notes
for the journal, frames to send, connections to close. `Server` is the shell: it checks frames,
calls the desk, and then carries out the effects in a fixed order. Notes are written before frames
are sent, so the journal knows everything that members know. A coordinator can therefore be killed
at any moment: the next one replays the journal, and members reconnect to it by themselves. Tests
drive the desk directly, with a clock and a journal of their own, through any order of events.

The files in reading order:

    protocol      frames, their fields, the handshake, join strings
    effects       `Outbox` and `Settings`: what the pure core puts out, and how patient it is
    coordinator   `Desk`: what follows from each event; who is let in; who is reported as slow
    membership    members, signs of life, speeds
    generations   the state machine: gather members, form a generation, close
    versions      which updates are journaled, each exactly once
    leases        which samples each member holds, for strategies that do not move in lockstep
    replay        a desk rebuilt from the journal
    server        the shell: event loop, journal, a coordinator's life (`serve`)
    connections   the server's non-blocking connections
    client        `Liaison`: a member's side
    session       the connection below it, which reconnects and repeats; `Reporter`
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
