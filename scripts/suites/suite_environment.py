"""Where the suites of others run: `.venv-suites`, and the settings of their jobs."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path

from jobs import CannotRun

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-suites"


def make_environment(packages: Iterable[str], beside: Iterable[str] = ()) -> Path:
    """The Python of `.venv-suites`, made if need be, with these packages beside those of this Python.

    Args:
        packages: that every test sees.
        beside: others, installed alone, in a folder of `.venv-suites` that no test sees by itself.
    """
    python = VENV / "bin" / "python"
    stamp = VENV / "installed.json"
    if not stamp.exists():
        print("making .venv-suites", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        borrow(python)
        stamp.write_text("[]")
    installed = set(json.loads(stamp.read_text()))
    if missing := sorted(set(packages) - installed):
        print("installing", *missing, flush=True)
        pip(python, "install", "--constraint", str(ROOT / "constraints.txt"), *missing)
        installed |= set(missing)
        stamp.write_text(json.dumps(sorted(installed)))
    if missing := sorted(set(beside) - installed):
        print("installing", *missing, flush=True)
        pip(python, "install", "--no-deps", "--upgrade", "--target", str(VENV / "beside"), *missing)
        stamp.write_text(json.dumps(sorted(installed | set(missing))))
    return python


def borrow(python: Path) -> None:
    """Let that Python read the packages of this one too: torch is gigabytes."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    ours = sysconfig.get_path("purelib")
    (Path(target) / "borrowed.pth").write_text(f"import site; site.addsitedir({ours!r})\n")


def pip(python: Path, *arguments: str) -> None:
    """Run pip; raise CannotRun with the end of what it says."""
    done = subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CannotRun(f"pip {' '.join(arguments)}: {done.stderr[-1000:]}")


def horovod_tests(python: Path, requirement: str) -> Path:
    """The folder of Horovod's tests, from a source distribution of that version: they are in no wheel."""
    place = VENV / requirement.replace("==", "-")
    if not place.exists():
        print("fetching the tests of", requirement, flush=True)
        pip(python, "download", "--no-deps", "--no-binary", ":all:", "--dest", str(VENV), requirement)
        with tarfile.open(f"{place}.tar.gz") as archive:
            tests = [one for one in archive.getmembers() if "/test/" in one.name and one.name.endswith(".py")]
            archive.extractall(VENV, tests, filter="data")
    return place


def job_settings(python: Path) -> dict[str, str]:
    """The environment of a job of that Python: this checkout, this mpirun, more ranks than cores."""
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **mpi_library_for(python),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MPISGD_PROFILE": "built-in",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


def mpi_library_for(python: Path) -> dict[str, str]:
    """The MPI library that a wheel has put beside this Python: the other one would look beside itself."""
    found = sorted((Path(sys.prefix) / "lib").glob("libmpi.so.[0-9]*"), key=lambda file: len(file.name))
    return {"MPI4PY_LIBMPI": str(found[0])} if found and str(python) != sys.executable else {}
