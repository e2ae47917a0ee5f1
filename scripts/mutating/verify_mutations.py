"""Put bugs into a copy of the package, one at a time: `python -m mpisgd verify --quick` finds each.

    python scripts/mutating/verify_mutations.py              # all, some minutes
    python scripts/mutating/verify_mutations.py residual     # those whose name contains a text

A check that cannot fail says nothing. A bug is found where numbers in the matrix differ; a job that crashes
does not count. The exit code is 1 if a bug was not found.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0


class Mutation(NamedTuple):
    """A bug.

    Attributes:
        name: what is wrong.
        path: of the file in the package.
        right: a text that the file has once.
        wrong: what takes its place.
        ranks: of the job that is to find it; `--quick` has 3 and 4.
    """

    name: str
    path: str
    right: str
    wrong: str
    ranks: int = 3


MUTATIONS = (
    Mutation(
        "between hosts an average divides by the ranks of this host",
        "transport/internode/transport.py",
        "return prepare(flat, op, self._topology.size, alone=self._all_alone)",
        "return prepare(flat, op, self._topology.local_size, alone=self._all_alone)",
    ),
    Mutation(
        "the average divides by one rank too few",
        "transport/torch_reduction.py",
        "return divide(out, len(pieces)) if op is ReduceOp.AVG else out",
        "return divide(out, len(pieces) - 1) if op is ReduceOp.AVG else out",
    ),
    Mutation(
        "the last rank's part is not added",
        "transport/torch_reduction.py",
        "for piece in pieces[1:-1] if at_once else pieces[1:]:",
        "for piece in pieces[1:-1]:",
    ),
    Mutation(
        "a bucket is reduced twice",
        "gradients/launcher.py",
        "        slot.reducer.reduce(flat, self.group, self._op)\n",
        "        slot.reducer.reduce(flat, self.group, self._op)\n" * 2,
    ),
    Mutation(
        "shards are not gathered after the second step",
        "methods/sharded/synchronizer.py",
        "        self._publication.publish(self._updated, in_background=not compares)\n",
        "        self._publication.publish(self._updated) if num_steps != 2 else None\n",
    ),
    Mutation(
        "a bucket keeps the gradients of its first step",
        "gradients/fusion_buffer.py",
        "            torch._foreach_copy_(self.views, self._apart(grads))\n        return kinds",
        "            torch._foreach_copy_(self.views, self._apart(grads)) if not self.flat.any() else None\n"
        "        return kinds",
    ),
    Mutation(
        "the part of a parameter in a piece begins one element too late",
        "sharding/division.py",
        "yield Member(item.param, (low - at) // size, (high - low) // size, (low - begin) // size)",
        "yield Member(item.param, (low - at) // size, (high - low) // size - 1, (low - begin) // size + 1)",
    ),
    Mutation(
        "a residual is dropped",
        "compress/residual.py",
        "return self.residual.add_(bucket)",
        "return self.residual.copy_(bucket)",
    ),
    Mutation(
        "the factor of a low-rank product stays the first one",
        "methods/power_sgd/power_sgd.py",
        "            factors[place] = piece.view(-1, self._ranks[place])\n\n    def _remember",
        "            factors[place] = factors[place]\n\n    def _remember",
    ),
    Mutation(
        "the magnitude of signs is that of one element too many",
        "compress/sign_code.py",
        "means = [torch.dot(piece, sign) / len(piece) for",
        "means = [torch.dot(piece, sign) / (len(piece) + 1) for",
    ),
    Mutation(
        "local steps are averaged one step too late",
        "methods/local_sgd/local_sgd.py",
        "if state.since_mean >= self._period:",
        "if state.since_mean > self._period:",
    ),
    Mutation(
        "the outer step is taken from this rank's change",
        "methods/diloco/diloco.py",
        "            self._wait = self._mean.start(begun, ",
        "            self._wait = self._mean.start([c.clone() for c in begun], ",
    ),
    Mutation(
        "the centre is drawn by the number of ranks too little",
        "methods/elastic_averaging/elastic_averaging.py",
        "torch._foreach_add_(centre, travels, alpha=self._beta)",
        "torch._foreach_add_(centre, travels, alpha=self._beta / self.training.group.size)",
    ),
    Mutation(
        "a rank counts too little in the mean with its neighbours",
        "gossip/neighbor_all_reduce.py",
        "parts = {**received, rank: wire}",
        "parts = {**received, rank: wire * 0.99}",
    ),
    Mutation(
        "push-sum forgets its weight",
        "methods/gossip/push_sum/push_sum.py",
        "        self.state.weight = weight.item()\n",
        "        self.state.weight = 1.0\n",
    ),
    Mutation(
        "a neighbour's compressed change counts whole",
        "methods/gossip/choco/choco.py",
        "self._total.add_(change, alpha=weight)",
        "self._total.add_(change)",
    ),
    Mutation(
        "what ranks keep during an overlap is exchanged with what they take",
        "methods/diloco/diloco.py",
        "torch._foreach_lerp_(params, outer, 1 - alpha)",
        "torch._foreach_lerp_(params, outer, alpha)",
    ),
    Mutation(
        "without locks a gradient counts whole",
        "methods/parameter_server/lock_free.py",
        "param.grad = None if param.grad is None else param.grad * self.scale",
        "param.grad = None if param.grad is None else param.grad",
    ),
    Mutation(
        "the adaptive sum takes off the whole product",
        "collectives/algorithms/adasum.py",
        "1.0 - float(dot) / (2.0 * square)",
        "1.0 - float(dot) / square",
    ),
    Mutation(
        "Horovod's gradients are not multiplied by what they were divided by",
        "horovod/gradients.py",
        "            postscale=factor,\n",
        "            postscale=1.0,\n",
    ),
    Mutation(
        "the mean of half-precision gradients is that of one rank more",
        "transport/torch_reduction.py",
        "else divide(work, size).to(dtype)",
        "else divide(work, size + (dtype in HALF_DTYPES)).to(dtype)",
    ),
    Mutation(
        "in a long average the last rank counts whole",
        "transport/torch_reduction.py",
        "out.new_ones(1), beta=share, alpha=share,",
        "out.new_ones(1), beta=share, alpha=1,",
        ranks=4,
    ),
    Mutation(
        "the variances of the ranks lack the distance of their means",
        "nn/batch_statistics.py",
        "(shares * (variances + (means - mean).square())).sum(0)",
        "(shares * variances).sum(0)",
    ),
    Mutation(
        "clipping looks at the gradients of this rank's pieces only",
        "sharding/grad_norm.py",
        "total: Tensor = torch.linalg.vector_norm(everyones[list(owners)], norm_type)",
        "total: Tensor = everyones[group.rank]",
    ),
    Mutation(
        "one element too few is among the largest",
        "compress/selection.py",
        "    return magnitudes.topk(k, sorted=False).indices\n",
        "    return magnitudes.topk(max(1, k - 1), sorted=False).indices\n",
    ),
    Mutation(
        "parts of tensors are cut one element too early",
        "transport/messages/link.py",
        "return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]",
        "return [(total * i // parts, max(total * (i + 1) // parts - 1, 0)) for i in range(parts)]",
    ),
)


def find(mutation: Mutation, folder: Path) -> tuple[bool, str]:
    """Return whether a cell of the matrix finds the bug, and what was said.

    A job that ends with an error, or not at all, finds it too, but says nothing of `verify`.
    """
    package = folder / "mpisgd"
    shutil.copytree(ROOT / "mpisgd", package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / mutation.path
    path.write_text(mutated(mutation, path.read_text()))
    cells = folder / "cells.json"
    words = [
        sys.executable,
        "-m",
        "mpisgd",
        "verify",
        "--quick",
        "--ranks",
        str(mutation.ranks),
        "--limit",
        "120",
    ]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*words, "--json", str(cells)],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end within {LIMIT_S:.0f} s"
    if not cells.exists():
        return False, "no matrix: " + (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
    return _red_cells(json.loads(cells.read_text())["cells"])


def _red_cells(cells: list[dict[str, Any]]) -> tuple[bool, str]:
    """Return whether there are some in which numbers differ, and which."""
    red = [cell for cell in cells if not cell["difference"] <= cell["tolerance"]]
    differ = [cell for cell in red if math.isfinite(cell["difference"])]
    if not differ:
        return False, red[0]["reason"] if red else f"all {len(cells)} cells are green"
    first, modes = differ[0], {cell["mode"] for cell in differ}
    where = f"{first['mode']}, {first['transport']}, {first['dtype']}"
    return True, f"{len(differ)} cells of {len(modes)} modes: {where}: off by {first['difference']:.1e}"


def mutated(mutation: Mutation, text: str) -> str:
    """Return the file with the bug."""
    if text.count(mutation.right) != 1:
        raise SystemExit(f"{mutation.path}: expected once: {mutation.right}")
    return text.replace(mutation.right, mutation.wrong)


def main() -> None:
    """Try all mutations, or those that the first argument names."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    missed = []
    for mutation in MUTATIONS:
        if wanted not in mutation.name:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found, said = find(mutation, Path(folder))
        seconds = time.monotonic() - started
        print(f"{'found ' if found else 'MISSED'} {seconds:4.0f} s  {mutation.name}: {said}", flush=True)
        missed += [] if found else [mutation.name]
    if missed:
        raise SystemExit(f"not found: {', '.join(missed)}")


if __name__ == "__main__":
    main()
