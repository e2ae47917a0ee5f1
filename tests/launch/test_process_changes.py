"""Installing mpisgd changes nothing: what `import torch` changes, what a job changes, and what is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import run_python

from mpisgd.torch_backend.plugin import WITH_DEVICES

PROGRAM = Path(__file__).parent / "programs" / "process_changes.py"
C10D = "torch.distributed.distributed_c10d"
BACKEND = f"{C10D}.Backend"
NAMES = ("MPISGD", *(name.upper() for name in WITH_DEVICES))

# A backend's name, what torch keeps of it, and a rendezvous handler.
OF_IMPORT = {
    *(f"{BACKEND}.{name}{part}" for name in NAMES for part in ("", ": _name")),
    *(f"{BACKEND}.{kept}" for kept in ("_plugins", "backend_capability", "backend_list", "backend_type_map")),
    "torch.distributed.rendezvous._rendezvous_handlers",
}
OF_TORCH = {
    f"{C10D}._backend",
    f"{C10D}._default_pg_init_method",
    "torch.utils.hooks.RemovableHandle.next_id",
}
OF_MPI = ("env OMPI_MCA_", "env PMIX_")


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_importing_adds_a_name_and_a_rendezvous_and_nothing_is_left_of_a_job(num_ranks):
    done = run_python(
        str(PROGRAM), num_ranks=num_ranks, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, fresh=True
    )
    assert done.returncode == 0, done.stderr
    by_import, during, left = (set(json.loads(line)) for line in done.stdout.splitlines())
    assert by_import == OF_IMPORT
    assert {"sys.exit", "torch.optim.sgd.SGD.step", f"{C10D}.monitored_barrier"} <= during
    assert ("env RANK" in during) == ("frozen objects" in during) == (num_ranks is not None)
    # torch's process group has put its exception hook before ours, which passes on from then on.
    assert {name for name in left - OF_TORCH if not name.startswith(OF_MPI)} <= {"sys.excepthook"}
