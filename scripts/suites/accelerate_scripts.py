"""The test scripts of Accelerate's wheel on `mpisgd`, each as a test: `accelerate.test_utils.scripts`.

    mpirun -n 2 python scripts/suites/accelerate_scripts.py FOLDER LIMIT_S NAME ...      see in_job.py

`accelerate launch` starts them as programs; here they are the main program of a rank, after `use_mpi()`.
"""

import functools
import importlib.util
import sys
import warnings
from pathlib import Path

import in_job

PACKAGE = "accelerate.test_utils.scripts"


def run_script(path: Path) -> None:
    """Run a script on the ranks of this job; SkipTest where it needs a package that is not there."""
    from mpisgd.integrations.accelerate import use_mpi

    warnings.simplefilter("ignore")
    use_mpi()
    in_job.run_program(path)


def tests() -> in_job.Tests:
    """The scripts by their names; those that need further packages are in a folder of their own."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{PACKAGE} is not installed")
    folder = Path(spec.submodule_search_locations[0])
    paths = sorted(folder.glob("test_*.py")) + sorted(folder.glob("external_deps/test_*.py"))
    return {path.stem: functools.partial(run_script, path) for path in paths}


if __name__ == "__main__":
    in_job.main(tests, sys.argv[1:])
