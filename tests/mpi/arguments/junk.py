"""What people pass by mistake, and predicates that say where it is none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

Predicate = Callable[[Any], bool]


class Hostile:
    """Refuses everything that one may ask of an object, as a half-made one does."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")

    def __repr__(self) -> str:
        return "<Hostile>"


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives them up
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


# By name, so that a failure can say which one it was. Made anew for every call: a generator is used up.
SAMPLES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1": lambda: 1,
    "10 ** 6": lambda: 10**6,
    "2 ** 70": lambda: 2**70,
    "-2 ** 70": lambda: -(2**70),
    "0.5": lambda: 0.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "1j": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "nonsense",
    "bytes": lambda: b"nonsense",
    "empty list": list,
    "list of None": lambda: [None],
    "list of True": lambda: [True],
    "list of floats": lambda: [0.5, math.nan],
    "list of lists": lambda: [[0]],
    "list of tensors": lambda: [torch.ones(7)],
    "list of meta tensors": lambda: [torch.ones(4, device="meta")] * 4,
    "dict": lambda: {"a": 1},
    "set": lambda: {1, 2},
    "object": object,
    "hostile object": Hostile,
    "a class": lambda: int,
    "a function": lambda: lambda: None,
    "generator": lambda: (x for x in (0.5, None)),
    "array": lambda: np.ones(4),
    "numpy float": lambda: np.float32(0.5),
    "tensor of 7": lambda: torch.ones(7),
    "tensor of no dimension": lambda: torch.tensor(1.0),
    "strings tensor-like": lambda: np.array(["a"]),
    "meta tensor": lambda: torch.ones(4, device="meta"),
    "sparse tensor": lambda: torch.ones(4).to_sparse(),
    "quantized tensor": quantized,
    "nested tensor": nested,
    "expanded tensor": lambda: torch.ones(1).expand(4),
    "int tensor": lambda: torch.ones(4, dtype=torch.int64),
    "module": lambda: torch.nn.Linear(2, 2),
    "optimizer's class": lambda: torch.optim.SGD,
    "dtype": lambda: torch.float32,
    "exception": lambda: ValueError("nonsense"),
}


def random_junk() -> st.SearchStrategy[Any]:
    """Of any size and depth; what is in it can be made on every rank alike."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.complex_numbers()
        | st.text(max_size=5)
        | st.binary(max_size=5)
        | st.sampled_from(list(SAMPLES)).map(lambda name: SAMPLES[name]())
    )
    return leaves | st.lists(leaves, max_size=5) | st.dictionaries(st.text(max_size=3), leaves, max_size=3)


def samples() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield from SAMPLES.items()


# What is right although it looks like nonsense elsewhere.


def nothing(value: Any) -> bool:
    return value is None


def flag(value: Any) -> bool:
    return isinstance(value, bool) or (type(value) is int and value in (0, 1))


def rank_of(size: int) -> Predicate:
    return lambda value: integer(value) and not isinstance(value, bool) and 0 <= value < size


def positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def positive_int(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def seed(value: Any) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**64


def natural(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def integer(value: Any) -> bool:
    return isinstance(value, int)


def text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def dense(value: Any) -> bool:
    """A tensor of any shape that can be sent."""
    ours = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    return ours and not value.is_quantized and not value.is_nested


def writable(value: Any) -> bool:
    """A tensor of any shape that can be written to."""
    return dense(value) and 0 not in value.stride()


def tensor_like(numel: int, dtype: torch.dtype, *, output: bool = False) -> Predicate:
    fits = writable if output else dense
    return lambda value: fits(value) and value.numel() == numel and value.dtype == dtype


def either(*predicates: Predicate) -> Predicate:
    return lambda value: any(predicate(value) for predicate in predicates)


def empty_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not value


def anything(value: Any) -> bool:
    return True
