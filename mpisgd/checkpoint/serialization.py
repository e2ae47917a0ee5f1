"""Serialization of nested values as JSON and tensors, without pickle.

Numbers, strings and None stand for themselves. Everything else is a list that begins with its kind:

    {"lr": 0.1, 3: (tensor, nan)}  ->  ["dict", "lr", 0.1, 3, ["tuple", ["tensor", "name"], ["float", "nan"]]]

so that keys of any plain type, tuples and infinities survive, and a reader needs no code of the writer.
"""

import base64
import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd.arguments import shown

__all__ = ["MAX_DEPTH", "MAX_DIMS", "WRONG_TREE", "Encoded", "decode", "encode", "tensor_names"]

MAX_DEPTH = 100  # of nested values
MAX_DIMS = 64  # of a tensor
# What `decode` raises where a tree is none that `encode` makes.
WRONG_TREE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

# What else torch calls a tensor: divided among ranks, fake, of another library. None of them is plain memory.
PLAIN_TENSORS: tuple[type, ...] = (Tensor, nn.Parameter, getattr(nn, "Buffer", Tensor))


class Encoded(NamedTuple):
    """A serialized value.

    Attributes:
        tree: JSON.
        tensors: by the name that stands for each in `tree`; not copied.
        problems: what cannot be saved, one line each; in the tree None stands in its place.
    """

    tree: Any
    tensors: dict[str, Tensor]
    problems: list[str]


def encode(values: Mapping[str, Any]) -> Encoded:
    """Serialize named values; a tensor that occurs twice is stored once."""
    encoder = _Encoder()
    tree = {name: encoder.encode(value, (name,)) for name, value in values.items()}
    return Encoded(tree, encoder.tensors, encoder.problems)


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of a tree.

    Raises:
        WRONG_TREE: `encode` makes no such tree.
    """
    if not isinstance(tree, list):
        return tree
    return _DECODERS[tree[0]](tree[1:], tensors)


def tensor_names(tree: Any) -> Iterator[str]:
    """Return the names of the tensors in a tree."""
    if not isinstance(tree, list) or not tree:
        return
    if tree[0] in ("tensor", "numpy", "numpy_scalar"):
        yield tree[1]
    else:
        for part in tree:
            yield from tensor_names(part)


Path = tuple[Any, ...]


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self._known: dict[Any, str] = {}

    def encode(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if len(path) > MAX_DEPTH:  # or contains itself
            return self._refuse(path[:5], f"and so on is nested more than {MAX_DEPTH} deep")
        if value is None or kind in (bool, int, str):
            return value
        if kind in _PLAIN:
            return _PLAIN[kind](value)
        if kind in _SEQUENCES:
            return [kind.__name__, *self._items(value, path)]
        if kind is collections.deque:
            return ["deque", value.maxlen, *self._items(value, path)]
        if kind in _DICTS:
            return self._dict(value, path)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        return self._refuse(path, f"is {_described(value)}")

    def _items(self, values: Iterable[Any], path: Path) -> list[Any]:
        return [self.encode(value, (*path, place)) for place, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: Path) -> Any:
        parts = []
        for key, entry in value.items():
            parts += [self.encode(key, path), self.encode(entry, (*path, key))]
        versions = getattr(value, "_metadata", None)  # torch keeps the versions of modules there
        if versions is not None:
            return ["module", self.encode(dict(versions), (*path, "_metadata")), *parts]
        return [_DICTS[type(value)], *parts]

    def _tensor(self, tensor: Tensor, path: Path) -> Any:
        problem = _why_not(tensor)
        if problem is not None:
            return self._refuse(path, problem)
        memory = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        where = (*memory, tensor.shape, tensor.stride())
        if not tensor.numel() or where not in self._known:
            self._known[where] = self._keep(tensor.detach(), path)
        return ["tensor", self._known[where]]

    def _array(self, array: "np.ndarray[Any, Any] | np.generic", path: Path) -> Any:
        try:
            tensor = torch.from_numpy(np.array(array))  # a copy: arrays may be read-only or reversed
        except (TypeError, ValueError):
            return self._refuse(path, f"is an array of {array.dtype}")
        return ["numpy" if isinstance(array, np.ndarray) else "numpy_scalar", self._keep(tensor, path)]

    def _keep(self, tensor: Tensor, path: Path) -> str:
        """Keep a tensor; return a readable name of its own: keys may have dots of their own."""
        name = _dotted(path)
        while name in self.tensors:
            name += "~"
        self.tensors[name] = tensor
        return name

    def _refuse(self, path: Path, problem: str) -> None:
        self.problems.append(f"{_dotted(path)} {problem}")


def _why_not(tensor: Tensor) -> str | None:
    kind = type(tensor)
    if kind.__module__.startswith("torch.distributed"):
        return f"is a {kind.__name__}, divided among ranks: use torch.distributed.checkpoint"
    if kind not in PLAIN_TENSORS or tensor.device.type == "meta":
        return f"is a {kind.__name__} on {tensor.device}: not plain memory"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return (
            f"has layout {tensor.layout}{', quantized' * tensor.is_quantized}; only dense ones can be saved"
        )
    if tensor.dim() > MAX_DIMS:
        return f"has {tensor.dim()} dimensions; at most {MAX_DIMS} can be saved"
    return None


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _described(value: Any) -> str:
    kind = type(value)
    named = f" {value.__qualname__}" if callable(value) and hasattr(value, "__qualname__") else ""
    return (
        f"a {kind.__name__}{named}"
        if kind.__module__ == "builtins"
        else f"a {kind.__module__}.{kind.__name__}"
    )


_DICTS = {
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.defaultdict: "dict",  # its factory is code, which the loading program has
    collections.Counter: "counter",
}
_SEQUENCES = (list, tuple, set, frozenset)
_PLAIN: dict[type, Callable[[Any], Any]] = {
    float: lambda value: value if math.isfinite(value) else ["float", repr(value)],
    torch.Size: lambda value: ["size", *value],
    bytes: lambda value: ["bytes", base64.b64encode(value).decode()],
    complex: lambda value: ["complex", repr(value)],
    torch.dtype: lambda value: ["dtype", str(value).removeprefix("torch.")],
    torch.device: lambda value: ["device", str(value)],
}

Parts = list[Any]
Tensors = Mapping[str, Tensor]


def _items(parts: Parts, tensors: Tensors) -> list[Any]:
    return [decode(part, tensors) for part in parts]


def _pairs(parts: Parts, tensors: Tensors) -> Iterator[tuple[Any, Any]]:
    items = iter(_items(parts, tensors))
    return zip(items, items, strict=True)


def _module_state(parts: Parts, tensors: Tensors) -> "collections.OrderedDict[str, Any]":
    state: collections.OrderedDict[str, Any] = collections.OrderedDict(_pairs(parts[1:], tensors))
    versions = collections.OrderedDict(decode(parts[0], tensors))
    state._metadata = versions  # type: ignore[attr-defined]
    return state


# A table: `getattr(torch, name)` would import modules of torch by the name that a file gives.
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as exc:
        raise ValueError(f"{shown(text)} is no device") from exc


_DECODERS: dict[str, Callable[[Parts, Tensors], Any]] = {
    "tensor": lambda parts, tensors: tensors[parts[0]],
    "numpy": lambda parts, tensors: tensors[parts[0]].numpy(),
    "numpy_scalar": lambda parts, tensors: tensors[parts[0]].numpy()[()],
    "float": lambda parts, tensors: float(parts[0]),
    "dict": lambda parts, tensors: dict(_pairs(parts, tensors)),
    "ordered": lambda parts, tensors: collections.OrderedDict(_pairs(parts, tensors)),
    "counter": lambda parts, tensors: collections.Counter(dict(_pairs(parts, tensors))),
    "module": _module_state,
    "list": _items,
    "tuple": lambda parts, tensors: tuple(_items(parts, tensors)),
    "set": lambda parts, tensors: set(_items(parts, tensors)),
    "frozenset": lambda parts, tensors: frozenset(_items(parts, tensors)),
    "deque": lambda parts, tensors: collections.deque(_items(parts[1:], tensors), maxlen=parts[0]),
    "size": lambda parts, tensors: torch.Size(parts),
    "bytes": lambda parts, tensors: base64.b64decode(parts[0], validate=True),
    "complex": lambda parts, tensors: complex(parts[0]),
    "dtype": lambda parts, tensors: _DTYPES[parts[0]],
    "device": lambda parts, tensors: _device(parts[0]),
}
