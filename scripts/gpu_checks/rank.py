"""One rank of a job of `./scripts/gpu_check`: does a check, and writes what it has found.

mpirun -n 2 python -m gpu_checks.rank CHECK FOLDER [--simulated] [--quick]
"""

import argparse
import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path

import torch

import mpisgd
from gpu_checks.catalog import CHECKS
from gpu_checks.gpu import FAILS, LEFT_OUT, Finding, Gpu, LeftOut, end_simulation

FACTS = "facts"  # in place of a check: what machine this is
TIMEOUT_S = 60.0


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("check", choices=[FACTS, *CHECKS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.check == FACTS:
        from gpu_checks.machine import facts

        _write(options.folder / "facts.json", facts(simulated=options.simulated))
        return
    gpu = Gpu(simulated=options.simulated, quick=options.quick)
    warnings.filterwarnings("ignore", "GPU tensors go through host memory")
    mpisgd.init(timeout_s=TIMEOUT_S)
    report = options.folder / f"rank-{mpisgd.rank()}.json"
    try:
        finding = CHECKS[options.check].run(gpu)
    except LeftOut as exc:
        finding = Finding(LEFT_OUT, "", str(exc))
    except Exception as exc:
        text = " ".join(f"{type(exc).__name__}: {exc}".split())
        _write(report, dataclasses.asdict(Finding(FAILS, "no error", text)))
        raise  # ends the job, in which others may wait for this rank
    _write(report, dataclasses.asdict(finding))
    if CHECKS[options.check].ends_a_rank:
        sys.stderr.flush()
        os._exit(0)  # what MPI does at its end without one of the ranks is no matter here
    mpisgd.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if gpu.is_simulated:
        end_simulation(0)


def _write(path: Path, content: object) -> None:
    """Write a file that is whole at any time."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content))
    beside.replace(path)


if __name__ == "__main__":
    main()
