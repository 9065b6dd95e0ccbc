"""A run's state in memory: nested data ⇄ named tensors and plain JSON; the random generators.

`flatten` and `unflatten` convert a state to and from the form that files and connections carry: a
flat set of named tensors, and a JSON skeleton that refers to them. No pickle anywhere. Checkpoints
use it, and so do members that send their state to an outdated one.
"""

from __future__ import annotations

import random
import zlib
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.errors import CheckpointError


class Flat(NamedTuple):
    """Tensors by path, and the rest as plain JSON data that points to them."""

    tensors: dict[str, Tensor]
    skeleton: Any


def flatten(state: Any) -> Flat:
    """Take a state apart. Nothing is copied: the tensors are those of `state`.

    Tensors that are one and the same (tied weights) are stored once.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def tensor(value: Tensor, path: str) -> dict[str, str]:
        identity = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        if value.numel() and identity in seen:
            return {_TENSOR: seen[identity]}
        seen[identity] = path
        tensors[path] = value.detach()
        return {_TENSOR: path}

    def walk(value: Any, path: str) -> Any:
        match value:
            case Tensor():
                return tensor(value, path)
            case dict():
                return mapping(value, path)
            case tuple():
                return {_TUPLE: [walk(item, f"{path}/{i}") for i, item in enumerate(value)]}
            case list():
                return [walk(item, f"{path}/{i}") for i, item in enumerate(value)]
            case None | bool() | int() | float() | str():
                return value
        raise CheckpointError(
            f"state at {path or '/'} is a {type(value).__name__}: "
            f"only tensors and plain data can be saved"
        )

    def mapping(value: dict[Any, Any], path: str) -> dict[str, Any]:
        inner = {
            str(key): walk(item, f"{path}/{key}" if path else str(key))
            for key, item in value.items()
        }
        if value and all(type(key) is int for key in value):
            return {_INTKEYS: inner}
        if not all(type(key) is str and not key.startswith("$") for key in value):
            raise CheckpointError(f"state at {path or '/'} has keys that are not plain names")
        return inner

    return Flat(tensors, walk(state, ""))


def unflatten(tensors: dict[str, Tensor], skeleton: Any) -> Any:
    """The inverse of `flatten`."""
    match skeleton:
        case {"$tensor": str(path), **rest} if not rest:
            if path not in tensors:
                raise CheckpointError(f"tensor {path!r} is missing")
            return tensors[path]
        case {"$tuple": list(items), **rest} if not rest:
            return tuple(unflatten(tensors, item) for item in items)
        case {"$intkeys": dict(inner), **rest} if not rest:
            return {int(key): unflatten(tensors, item) for key, item in inner.items()}
        case dict():
            return {key: unflatten(tensors, item) for key, item in skeleton.items()}
        case list():
            return [unflatten(tensors, item) for item in skeleton]
    return skeleton


_TENSOR, _TUPLE, _INTKEYS = "$tensor", "$tuple", "$intkeys"


# Random generators that the run, or a data set of the user, may draw from


def seed(number: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def part_ways(number: int, member: int, version: int) -> None:
    """Seed members whose samples differ from the first member's, each with a number of its own."""
    if member > 0:
        seed(zlib.crc32(f"{number} {member} {version}".encode()))


def capture() -> dict[str, Any]:
    """Return the state of the generators of torch, Python and NumPy."""
    name, keys, place, has_spare, spare = cast(_NumpyState, np.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), place, has_spare, spare),
    }


def restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, place, has_spare, spare = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_spare, spare))


_NumpyState: TypeAlias = tuple[str, NDArray[np.uint32], int, int, float]
