"""Nested state ⇄ a flat set of named tensors and a JSON skeleton. No pickle anywhere."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from echelon.core.errors import CheckpointError

_TENSOR, _TUPLE, _INTKEYS = "$tensor", "$tuple", "$intkeys"


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
