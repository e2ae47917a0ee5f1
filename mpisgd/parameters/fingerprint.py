"""Fingerprints: 64 bits that tell whether two ranks hold the same bits in the same places.

What a cryptographic hash does at 1 to 2 GB/s, three operations of torch do at two to four times that, on a
GPU too: the words of a tensor, each times a random number of its place, added up. A word has 32 bits and its
product 64, so two changes cancel with a probability of about 2**-32 wherever they are; in products as wide
as the words, two flipped signs always would.

Source: Lemire and Kaser 2014, "Strongly universal string hashing is fast" (multilinear hashing).
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["fingerprints"]

CHUNK = 2**16  # words; their products stay in the cache
WORD_BYTES = 4


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for the bits of each tensor, strided or sparse, on any device; not of its shape."""
    sums: dict[torch.device, list[Tensor]] = defaultdict(list)
    spans = []
    for tensor in tensors:
        found = sums[tensor.device]
        start = len(found)
        for part in _parts(tensor):
            found += _sums(_words(part))
        spans.append((tensor.device, start, len(found)))
    known = {device: torch.stack(found).tolist() if found else [] for device, found in sums.items()}
    return [_fold(known[device][start:stop]) for device, start, stop in spans]


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that make up `tensor`."""
    if not tensor.is_sparse:
        return [tensor]
    joined = tensor.coalesce()
    return [joined.indices(), joined.values()]


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor in the order of its elements, as int32 [n], zeros at the end."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # a view may have any stride where there is one element
    if flat.nbytes % WORD_BYTES == 0 and flat.storage_offset() * flat.itemsize % WORD_BYTES == 0:
        return flat.view(torch.int32)
    bits = flat.view(torch.uint8)
    padded = torch.zeros(-(-bits.numel() // WORD_BYTES) * WORD_BYTES, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits
    return padded.view(torch.int32)


def _sums(words: Tensor) -> list[Tensor]:
    """Return one number for each chunk."""
    weights = _weights(words.device)
    products = torch.empty(min(CHUNK, words.numel()), dtype=torch.int64, device=words.device)
    return [
        torch.mul(chunk, weights[: chunk.numel()], out=products[: chunk.numel()]).sum()
        for chunk in (torch.split(words, CHUNK) if words.numel() else ())
    ]


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Return [CHUNK] random int64, the same on all ranks."""
    draw = torch.Generator().manual_seed(20140)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    with torch.inference_mode(False):
        return torch.randint(low, high, (CHUNK,), generator=draw).to(device)


def _fold(sums: Sequence[int]) -> int:
    """Return one number for a tensor, in which the order of its chunks counts."""
    told = b"".join(number.to_bytes(8, "little", signed=True) for number in sums)
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
