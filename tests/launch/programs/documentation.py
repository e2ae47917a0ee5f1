"""Run blocks of Python of the documentation on all ranks: documentation.py FOLDER PAGE:LINE ...

The blocks of a page share their names, in the order of the page. Every page begins with those of `fresh()`,
which its fragments use. Prints the blocks that failed, and ends with 1 then.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import types
import warnings
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "docs_site"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import torch
import torch.distributed as dist
from blocks import ROOT, Block, blocks

import mpisgd


def fresh() -> dict[str, object]:
    """The names that fragments use: a model, its optimizer, and some data."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))
    return {
        "torch": torch,
        "dist": dist,
        "mpisgd": mpisgd,
        "model": model,
        "inputs": inputs,
        "targets": targets,
        "batches": [(inputs, targets)] * 2,
        "dataset": dataset,
        "loader": torch.utils.data.DataLoader(dataset, batch_size=32, drop_last=True),
    }


def run(block: Block, names: dict[str, object]) -> None:
    """Run a block; tracebacks show the page."""
    for text, line in (
        (block.setup, 1),
        (block.text.replace("/scratch", os.path.abspath("scratch")), block.line),
    ):
        exec(compile("\n" * (line - 1) + text, str(ROOT / block.page), "exec"), names)


def run_page(chosen: list[Block], folder: Path) -> str:
    """Run blocks of a page; the traceback of one that failed on this rank, or on another one."""
    home = folder / chosen[0].page.replace("/", "-")
    (home / "scratch" / "run").mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    name = "page_" + "".join(c if c.isalnum() else "_" for c in chosen[0].page)
    module = sys.modules[name] = types.ModuleType(name)  # dataclasses look there
    module.__dict__.update(fresh())
    for block in chosen:
        failed = ""
        try:
            if "rank 0" not in block.markers or mpisgd.rank() == 0:
                run(block, module.__dict__)
        except Exception:
            failed = f"{block.where}, rank {mpisgd.rank()}:\n{traceback.format_exc()}"
        verdicts = [None] * mpisgd.size()
        mpisgd.all_gather_object(verdicts, failed)
        if any(verdicts):
            return next(filter(None, verdicts))
    if dist.is_initialized():
        dist.destroy_process_group()
    return ""


def main() -> int:
    """Run the blocks that are named; the exit code."""
    warnings.simplefilter("ignore")
    folder, wanted = Path(sys.argv[1]), set(sys.argv[2:])
    paths = sorted({ROOT / name.rpartition(":")[0] for name in wanted})
    chosen = [block for path in paths for block in blocks(path) if block.where in wanted]
    mpisgd.init(timeout_s=60)
    failures = []
    for page, on_page in groupby(chosen, key=lambda block: block.page):
        start = time.monotonic()
        if failed := run_page(list(on_page), folder):
            failures.append(failed)
        if mpisgd.rank() == 0:
            print(f"{page}: {time.monotonic() - start:.1f} s", flush=True)
    if mpisgd.rank() == 0:
        print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
