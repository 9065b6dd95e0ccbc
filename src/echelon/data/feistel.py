"""A keyed permutation of [0, n) that is computed, not stored."""

from __future__ import annotations

import math

import numpy as np

from echelon.core.hashing import Words, keys

ROUNDS = 6
BLOCK = 1 << 14
"""Values permuted at a time: five arrays of this many words stay in a core's own cache."""
_HALF = np.array(32, np.uint64)
_MULTIPLIER = np.array(0xD6E8FEB86659FD93, np.uint64)


class Feistel:
    """A generalised Feistel network over Z_a × Z_b, with a ≈ b ≈ √n.

    A value is written as left·b + right. A round adds a keyed hash of one half to the other half,
    which the next round can undo: so each round is one-to-one, whatever the hash. Because
    0 ≤ a·b − n < a, a value that lands beyond n and has to walk on is one in √n.
    """

    def __init__(self, n: int, *names: int) -> None:
        assert 1 <= n <= 1 << 62, f"a permutation of {n} values: 1 to 2**62 can be had"
        left = math.isqrt(n - 1) + 1
        self._n = n
        self._sizes = np.array([left, -(-n // left)], np.uint64)
        words = keys(2 * ROUNDS, *names)
        self._factors = words[:ROUNDS] | np.uint64(1)
        self._terms = words[ROUNDS:]

    def permute(self, values: Words) -> None:
        """Put in the place of each value the one it is mapped to."""
        scratch = np.empty((4, min(BLOCK, len(values))), np.uint64)
        for start in range(0, len(values), BLOCK):
            block = values[start : start + BLOCK]
            self._once(block, scratch[:, : len(block)])
            self._walk(block)

    def _walk(self, block: Words) -> None:
        """Map values beyond n again until they are within: what remains is still one-to-one."""
        if int(block.max()) < self._n:
            return
        beyond = np.flatnonzero(block >= self._n)
        while beyond.size:
            moved = block[beyond]
            self._once(moved, np.empty((4, moved.size), np.uint64))
            block[beyond] = moved
            beyond = beyond[moved >= self._n]

    def _once(self, block: Words, scratch: Words) -> None:
        left, right, hashed, spare = scratch
        left_size, right_size = self._sizes[0, ...], self._sizes[1, ...]
        np.floor_divide(block, right_size, out=left)
        np.multiply(left, right_size, out=spare)
        np.subtract(block, spare, out=right)
        target, other, size, other_size = left, right, left_size, right_size
        for number in range(ROUNDS):
            self._hash(number, other, size, hashed, spare)
            np.add(target, hashed, out=target)
            # Modulo without division: what is below `size` wraps round to something huge.
            np.subtract(target, size, out=spare)
            np.minimum(target, spare, out=target)
            target, other, size, other_size = other, target, other_size, size
        np.multiply(left, right_size, out=block)
        np.add(block, right, out=block)

    def _hash(self, number: int, half: Words, size: Words, out: Words, spare: Words) -> None:
        """A keyed hash of `half` in [0, size): multiply and shift do what a remainder would."""
        np.multiply(half, self._factors[number, ...], out=out)
        np.add(out, self._terms[number, ...], out=out)
        np.right_shift(out, _HALF, out=spare)
        np.bitwise_xor(out, spare, out=out)
        np.multiply(out, _MULTIPLIER, out=out)
        np.right_shift(out, _HALF, out=out)
        np.multiply(out, size, out=out)
        np.right_shift(out, _HALF, out=out)
