"""The states of a rank's random number generators: torch's, numpy's and Python's.

In a job of more ranks than the saved one, the generators of ranks without a saved state are seeded by the
state of rank `rank % ranks` and their own rank: reproducible, and different on every rank.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "check", "restore"]

NUMPY_WORDS = 624


def capture() -> dict[str, Any]:
    """Return the states of this rank's generators, as copies."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": (version, torch.tensor(words), gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def check(states: Sequence[Any]) -> None:
    """Raise ValueError, or what a wrong type raises, unless each state is one that `capture` returns.

    A state is set on generators of its own; numpy takes any position, also one outside of its memory.
    """
    for state in states:
        try:
            torch.Generator().set_state(state["torch"])
        except RuntimeError as exc:
            raise ValueError(f"torch's state: {exc}") from exc
        numpy_state = state["numpy"]
        np.random.RandomState().set_state(numpy_state)
        if not 0 <= numpy_state["state"]["pos"] <= NUMPY_WORDS:
            raise ValueError("numpy's state: a position outside of it")
        random.Random().setstate(_python_state(state["python"]))
        if "cuda" in state and state["cuda"].dtype is not torch.uint8:
            raise TypeError("the GPU's state is not in bytes")


def restore(states: Sequence[dict[str, Any]], rank: int) -> None:
    """Restore the generators of this rank.

    Args:
        states: what `capture` returned on each rank of the saved job.
        rank: of this process.
    """
    if rank < len(states):
        _resume(states[rank])
        return
    alike = states[rank % len(states)]["torch"].numpy().tobytes()
    digest = hashlib.blake2b(alike + rank.to_bytes(8, "little"), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _resume(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(_python_state(state["python"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _python_state(saved: tuple[int, torch.Tensor, float | None]) -> tuple[int, tuple[int, ...], float | None]:
    version, words, gauss = saved
    if gauss is not None and type(gauss) is not float:
        raise TypeError("Python's state: gauss is no number")
    return version, tuple(words.tolist()), gauss
