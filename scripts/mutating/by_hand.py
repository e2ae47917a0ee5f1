"""Faults that were written by hand: each is one that somebody has made, or nearly made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutating.operators import Mutant, executed_lines

__all__ = ["EDITS", "by_hand"]


class _Edit(NamedTuple):
    """A fault.

    Attributes:
        name: what is wrong.
        path: of the file in the package.
        right: a text that the file has once.
        wrong: what takes its place.
    """

    name: str
    path: str
    right: str
    wrong: str


EDITS = (
    _Edit(
        "between hosts an average divides by the ranks of this host",
        "transport/internode/transport.py",
        "return prepare(flat, op, self._topology.size, alone=self._all_alone)",
        "return prepare(flat, op, self._topology.local_size, alone=self._all_alone)",
    ),
    _Edit(
        "the average divides by one rank too few",
        "transport/torch_reduction.py",
        "return divide(out, len(pieces)) if op is ReduceOp.AVG else out",
        "return divide(out, len(pieces) - 1) if op is ReduceOp.AVG else out",
    ),
    _Edit(
        "the last rank's part is not added",
        "transport/torch_reduction.py",
        "for piece in pieces[1:-1] if at_once else pieces[1:]:",
        "for piece in pieces[1:-1]:",
    ),
    _Edit(
        "a bucket is reduced twice",
        "gradients/launcher.py",
        "        slot.reducer.reduce(flat, self.group, self._op)\n",
        "        slot.reducer.reduce(flat, self.group, self._op)\n" * 2,
    ),
    _Edit(
        "shards are not gathered after the second step",
        "methods/sharded/synchronizer.py",
        "        self._publication.publish(self._updated, in_background=not compares)\n",
        "        self._publication.publish(self._updated) if num_steps != 2 else None\n",
    ),
    _Edit(
        "a bucket keeps the gradients of its first step",
        "gradients/fusion_buffer.py",
        "            torch._foreach_copy_(self.views, self._apart(grads))\n        return flags",
        "            torch._foreach_copy_(self.views, self._apart(grads)) if not self.flat.any() else None\n"
        "        return flags",
    ),
    _Edit(
        "the part of a parameter in a piece begins one element too late",
        "sharding/division.py",
        "yield Member(item.param, (low - at) // size, (high - low) // size, (low - begin) // size)",
        "yield Member(item.param, (low - at) // size, (high - low) // size - 1, (low - begin) // size + 1)",
    ),
    _Edit(
        "a residual is dropped",
        "compress/residual.py",
        "return kept.add_(bucket)",
        "return kept.copy_(bucket)",
    ),
    _Edit(
        "the factor of a low-rank product stays the first one",
        "methods/power_sgd/power_sgd.py",
        "            factors[place] = piece.view(-1, self._ranks[place])\n\n    def _remember",
        "            factors[place] = factors[place]\n\n    def _remember",
    ),
    _Edit(
        "the magnitude of signs is that of one element too many",
        "compress/sign_code.py",
        "means = [torch.dot(piece, sign) / len(piece) for",
        "means = [torch.dot(piece, sign) / (len(piece) + 1) for",
    ),
    _Edit(
        "local steps are averaged one step too late",
        "methods/local_sgd/local_sgd.py",
        "if state.since_mean >= self._period:",
        "if state.since_mean > self._period:",
    ),
    _Edit(
        "the outer step is taken from this rank's change",
        "methods/diloco/fragment.py",
        "            self._wait = self._mean.start(begun, ",
        "            self._wait = self._mean.start([c.clone() for c in begun], ",
    ),
    _Edit(
        "the centre is drawn by the number of ranks too little",
        "methods/elastic_averaging/elastic_averaging.py",
        "torch._foreach_add_(centre, travels, alpha=self._beta)",
        "torch._foreach_add_(centre, travels, alpha=self._beta / self.training.group.size)",
    ),
    _Edit(
        "a rank counts too little in the mean with its neighbours",
        "gossip/neighbor_all_reduce.py",
        "parts = {**received, rank: wire}",
        "parts = {**received, rank: wire * 0.99}",
    ),
    _Edit(
        "push-sum forgets its weight",
        "methods/gossip/push_sum/push_sum.py",
        "        self.state.weight = weight.item()\n",
        "        self.state.weight = 1.0\n",
    ),
    _Edit(
        "a neighbour's compressed change counts whole",
        "methods/gossip/choco/choco.py",
        "self._total.add_(change, alpha=weight)",
        "self._total.add_(change)",
    ),
    _Edit(
        "what ranks keep during an overlap is exchanged with what they take",
        "methods/diloco/fragment.py",
        "torch._foreach_lerp_(params, new, 1 - alpha)",
        "torch._foreach_lerp_(params, new, alpha)",
    ),
    _Edit(
        "learners count by their examples, and not by the square of these",
        "methods/diloco/quorum/rounds.py",
        "Fraction(each.examples**2, each.steps)",
        "Fraction(each.examples, each.steps)",
    ),
    _Edit(
        "what was pushed to the servers is pushed again",
        "methods/parameter_server/locked_shards.py",
        "        accrued, self._accrued = self._accrued, {}\n",
        "        accrued = dict(self._accrued)\n",
    ),
    _Edit(
        "of a long message every part on a host is the first",
        "transport/shm/reduction.py",
        "        at = address + first * itemsize\n",
        "        at = address\n",
    ),
    _Edit(
        "the first rank keeps the last parameter that it gives the others",
        "optim/broadcast.py",
        'named = name_tensors("broadcast_parameters", params)\n',
        'named = [*name_tensors("broadcast_parameters", params)][:-1]\n',
    ),
    _Edit(
        "without locks a gradient counts whole",
        "methods/parameter_server/lock_free.py",
        "param.grad = own * self.scale",
        "param.grad = own.clone()",
    ),
    _Edit(
        "the adaptive sum takes off the whole product",
        "collectives/algorithms/adasum.py",
        "1.0 - float(dot) / (2.0 * square)",
        "1.0 - float(dot) / square",
    ),
    _Edit(
        "Horovod's gradients are not multiplied by what they were divided by",
        "horovod/gradients.py",
        "            postscale=factor,\n",
        "            postscale=1.0,\n",
    ),
    _Edit(
        "the mean of half-precision gradients is that of one rank more",
        "transport/torch_reduction.py",
        "else divide(work, size).to(dtype)",
        "else divide(work, size + (dtype in HALF_DTYPES)).to(dtype)",
    ),
    _Edit(
        "in a long average the last rank counts whole",
        "transport/torch_reduction.py",
        "out.new_ones(1), beta=share, alpha=share,",
        "out.new_ones(1), beta=share, alpha=1,",
    ),
    _Edit(
        "the variances of the ranks lack the distance of their means",
        "nn/batch_statistics.py",
        "(shares * (variances + (means - mean).square())).sum(0)",
        "(shares * variances).sum(0)",
    ),
    _Edit(
        "clipping looks at the gradients of this rank's pieces only",
        "sharding/grad_norm.py",
        "total: Tensor = torch.linalg.vector_norm(everyones[list(owners)], norm_type)",
        "total: Tensor = everyones[group.rank]",
    ),
    _Edit(
        "one element too few is among the largest",
        "compress/selection.py",
        "    return magnitudes.topk(k, sorted=False).indices\n",
        "    return magnitudes.topk(max(1, k - 1), sorted=False).indices\n",
    ),
    _Edit(
        "parts of tensors are cut one element too early",
        "transport/messages/link.py",
        "return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]",
        "return [(total * i // parts, max(total * (i + 1) // parts - 1, 0)) for i in range(parts)]",
    ),
)


def by_hand(package: Path) -> Iterator[Mutant]:
    """Yield them, with their names as kinds.

    Args:
        package: its folder.

    Raises:
        ValueError: a text is not there once; the file has changed.
    """
    for edit in EDITS:
        source = (package / edit.path).read_text()
        before, found, after = source.partition(edit.right)
        if not found or edit.right in after:
            raise ValueError(f"{edit.path}: expected once: {edit.right}")
        line = before.count("\n") + 1
        column = len(before.rpartition("\n")[2].encode())
        lines = executed_lines(source)[line]
        yield Mutant(edit.path, line, column, edit.name, edit.right, edit.wrong, lines)
