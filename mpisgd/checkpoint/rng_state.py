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

__all__ = ["capture", "restore"]


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
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
