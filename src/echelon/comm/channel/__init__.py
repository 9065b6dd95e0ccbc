"""The wire between trainers and servers: frames over TCP or unix sockets, and shared memory.

Both ends have shown that they know the run's key before the first frame. What leaves the host is
encrypted. A peer that dies, freezes or vanishes is a `PeerError`, in time.
"""

from echelon.comm.channel.connection import Connection
from echelon.comm.channel.endpoint import Listener, connect
from echelon.comm.channel.frames import Frame
from echelon.comm.channel.sockets import Address
from echelon.comm.shared_memory import Segment

__all__ = ["Address", "Connection", "Frame", "Listener", "Segment", "connect"]
