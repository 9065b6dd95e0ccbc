"""Frames that are wrong in every way, from a peer that has the key.

The head of a right frame describes the frame, so that the receiver can check that it was sent.
Bodies on a plain connection are not changed: only TCP protects those.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from echelon.comm.channel import Connection, Frame, handshake
from echelon.comm.channel.frames import HEADER, pack
from echelon.comm.channel.handshake import Card, Keys
from echelon.comm.channel.sockets import Address, open_socket
from echelon.comm.channel.stream import RECORD, SMALL, TAG, Cipher
from echelon.comm.peers import this_host

_ABOUT = struct.Struct("<BQQI")
_FIELDS = struct.Struct("<4sBBHIQQI")
LARGEST = 512
LONG = 0.02
"""The part of bodies that are too large for one record."""


class Wrong(AssertionError):
    """A frame was let in that nobody had sent."""


def check(connection: Connection, frame: Frame) -> None:
    """That this is a frame as `Peer.frame` makes them."""
    body = connection.take_bytes()
    about = (frame.kind, frame.seq, frame.size, crc32(body))
    if len(frame.head) < _ABOUT.size or _ABOUT.unpack_from(frame.head) != about:
        raise Wrong(f"{frame} was never sent")


def serve(connection: Connection, patience: float = 10.0) -> int:
    """All frames of one peer until it errs or ends: how many were right. PeerError at the end."""
    count = 0
    while True:
        frame = connection.receive(patience)
        if frame is None:
            raise Wrong("neither a frame nor an error: a hang")
        check(connection, frame)
        count += 1


@dataclass
class Sent:
    """One frame on the wire."""

    wire: bytes
    body: int
    """Bytes at its end that are not watched over."""


class Peer:
    """Makes frames by hand; whoever makes them has the session's keys."""

    def __init__(self, keys: Keys, sealed: bool, rng: random.Random) -> None:
        self._next, self._rng = keys.send_start, rng
        self._cipher = Cipher(keys.send) if sealed else None

    def frame(self) -> Sent:
        rng = self._rng
        kind, seq = rng.randrange(240), rng.getrandbits(64)
        size = rng.choice((0, 0, 1, 30, LARGEST))
        if rng.random() < LONG:
            size = rng.randrange(SMALL - 1, 2 * RECORD + 2)
        body = rng.randbytes(size)
        head = _ABOUT.pack(kind, seq, len(body), crc32(body)) + rng.randbytes(rng.randrange(20))
        return self.made(kind, seq, head, body)

    def made(self, kind: int, seq: int, head: bytes, body: bytes) -> Sent:
        header = pack(kind, seq, head, len(body), self._next, sealed=self._cipher is not None)
        self._next = self._next + 1 & 0xFFFFFFFF
        if self._cipher is None:
            return Sent(header + head + body, len(body))
        small = len(body) <= SMALL
        parts = [] if small else [body[at : at + RECORD] for at in range(0, len(body), RECORD)]
        records = [self._sealed(head + body if small else head, header)]
        records += [self._sealed(part) for part in parts]
        return Sent(header + b"".join(records), 0)

    def _sealed(self, text: bytes, beside: bytes = b"") -> bytes:
        assert self._cipher is not None
        record = bytearray(len(text) + TAG)
        self._cipher.seal(memoryview(text), memoryview(record), beside)
        return bytes(record)

    def lie(self) -> Sent:
        """A frame whose checks are right and whose fields are not."""
        rng, start = self._rng, self._next
        right = bytearray(self.frame().wire)
        fields = list(_FIELDS.unpack_from(right))
        at, lies = rng.choice(_LIES)
        fields[at] = rng.choice(lies)
        right[: _FIELDS.size] = _FIELDS.pack(*fields)
        right[_FIELDS.size : HEADER] = struct.pack("<I", crc32(right[: _FIELDS.size], start))
        return Sent(bytes(right), 0)


_LIES: list[tuple[int, list[object]]] = [
    (0, [b"\0\0\0\0", b"HTTP", b"ECHh"]),
    (1, [0, 2, 255]),
    (2, [240, 250, 254]),
    (3, [1, 0x8000, 0xFFFF]),
    (4, [0xFFFFFFFF, 65537, 0x80000000]),
    (6, [1 << 63, (1 << 64) - 1, 1 << 40, (1 << 20) + 1]),
]

Mutation = Callable[[list[Sent], Peer, random.Random], bytes]


def flip(frames: list[Sent], _: Peer, rng: random.Random) -> bytes:
    wires = [bytearray(frame.wire) for frame in frames]
    at = rng.randrange(len(frames))
    for _i in range(rng.choice((1, 1, 1, 2, 8))):
        place = rng.randrange(len(wires[at]) - frames[at].body)
        wires[at][place] ^= 1 << rng.randrange(8)
    return b"".join(wires)


def cut(frames: list[Sent], _: Peer, rng: random.Random) -> bytes:
    whole = b"".join(frame.wire for frame in frames)
    return whole[: rng.randrange(len(whole))]


def swap(frames: list[Sent], peer: Peer, rng: random.Random) -> bytes:
    wires = [frame.wire for frame in [*frames, peer.frame()]]
    at = rng.randrange(len(wires) - 1)
    wires[at], wires[at + 1] = wires[at + 1], wires[at]
    return b"".join(wires)


def double(frames: list[Sent], _: Peer, rng: random.Random) -> bytes:
    wires = [frame.wire for frame in frames]
    at = rng.randrange(len(wires))
    return b"".join([*wires[: at + 1], wires[at], *wires[at + 1 :]])


def drop(frames: list[Sent], peer: Peer, rng: random.Random) -> bytes:
    wires = [frame.wire for frame in frames]
    del wires[rng.randrange(len(wires))]
    return b"".join([*wires, peer.frame().wire])


def insert(frames: list[Sent], peer: Peer, rng: random.Random) -> bytes:
    def longer(wire: bytes, guarded: int) -> bytes:
        at = rng.randrange(guarded)
        return wire[:at] + rng.randbytes(rng.choice((1, 3, HEADER))) + wire[at:]

    return _but_last(frames, longer, peer)


def remove(frames: list[Sent], peer: Peer, rng: random.Random) -> bytes:
    def shorter(wire: bytes, guarded: int) -> bytes:
        at = rng.randrange(guarded)
        return wire[:at] + wire[min(guarded, at + rng.choice((1, 4, HEADER))) :]

    return _but_last(frames, shorter, peer)


def _but_last(frames: list[Sent], change: Callable[[bytes, int], bytes], peer: Peer) -> bytes:
    """All but the last as they are; that one changed, and not in its body alone."""
    last = frames[-1]
    guarded = len(last.wire) - last.body
    changed = last.wire
    while changed[:guarded] == last.wire[:guarded]:
        changed = change(last.wire, guarded)
    return b"".join([*(frame.wire for frame in frames[:-1]), changed, peer.frame().wire])


def lie(frames: list[Sent], peer: Peer, _: random.Random) -> bytes:
    return b"".join([*(frame.wire for frame in frames), peer.lie().wire])


def garbage(frames: list[Sent], _: Peer, rng: random.Random) -> bytes:
    noise = rng.randbytes(rng.choice((HEADER, 200, 3000)))
    return b"".join([*(frame.wire for frame in frames), noise])


MUTATIONS: tuple[Mutation, ...] = (
    *(flip, cut, swap, double, drop, insert, remove, lie, garbage),
    *(flip, lie),  # those are the most various
)


def mutated(keys: Keys, sealed: bool, rng: random.Random) -> bytes:
    """What a peer sends that is right at first, perhaps, and then wrong."""
    peer = Peer(keys, sealed, rng)
    frames = [peer.frame() for _ in range(rng.choice((1, 1, 2, 3)))]
    return rng.choice(MUTATIONS)(frames, peer, rng)


def greet(address: Address, key: bytes, *, seal: bool = False) -> tuple[socket.socket, Keys]:
    """A socket whose other end takes us for one of its own."""
    opened = open_socket(address, 10.0)
    nonce = handshake.fresh_nonce()
    heard = exactly(opened, handshake.CHALLENGE)
    theirs, _ = handshake.read_challenge(heard)
    said = handshake.call(key, nonce, seal, Card("mutant", 1, this_host()), heard)
    opened.sendall(said)
    start = exactly(opened, handshake.ANSWER)
    exactly(opened, handshake.answer_length(start) - len(start))
    return opened, handshake.keys(key, theirs, nonce, calling=True)


def exactly(opened: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = opened.recv(count - len(found))
        assert part, "hung up"
        found += part
    return bytes(found)
