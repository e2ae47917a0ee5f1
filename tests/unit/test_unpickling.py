"""What is unpickled came from a rank of the job by MPI: no files, no memory, no sockets.

torch's RPC unpickles what comes by its sockets, once its signature is checked (tests/unit/rpc).
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Where objects are unpickled, and how they have come there.
FROM_OTHER_RANKS = {
    "mpisgd/collectives/objects.py",
    "mpisgd/data/scatter.py",
    "mpisgd/horovod/functions.py",
    "mpisgd/job/quiesce.py",  # by MPI
    "mpisgd/monitor/mpi_mailbox.py",  # by MPI
    "mpisgd/pipeline/messages.py",
    "mpisgd/transport/device/messages.py",  # by MPI
    "mpisgd/transport/loopback/communicator.py",  # threads of this process
    "mpisgd/transport/loopback/meeting.py",  # likewise
    "scripts/testing/preloaded.py",  # by a socket in a folder of this user's
}
# The program that the user starts, as `python` itself would run it.
RUNS_PROGRAMS = {"mpisgd/horovod/shim/program.py", "scripts/testing/preloaded.py"}

UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "_pickle"}


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def name_of(call: ast.Call) -> str:
    """For example `torch.load`."""
    return ast.unparse(call.func)


def loads_objects(call: ast.Call) -> bool:
    name, words = name_of(call), {word.arg: ast.unparse(word.value) for word in call.keywords}
    if name in ("torch.load", "torch.serialization.load"):
        return words.get("weights_only") != "True"
    if name in ("np.load", "numpy.load"):
        return words.get("allow_pickle", "False") != "False"
    module, _, method = name.rpartition(".")
    return method in ("loads", "load", "Unpickler") and module in UNPICKLERS


def mentions(path: Path) -> bool:
    """Whether a file unpickles, also by handing the function on."""
    text = path.read_text()
    return any(map(loads_objects, calls(path))) or "pickle.loads" in text or "pickle.load(" in text


def sources() -> list[Path]:
    return sorted([*(ROOT / "mpisgd").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])


def test_only_objects_of_other_ranks_are_unpickled():
    found = {str(path.relative_to(ROOT)) for path in sources() if mentions(path)}
    assert found == FROM_OTHER_RANKS


def test_no_text_is_run_as_a_program():
    found = {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(name_of(call) in ("eval", "exec", "compile") for call in calls(path))
    }
    assert found == RUNS_PROGRAMS


def test_the_search_finds_what_it_looks_for(tmp_path):
    """The tests above would be green, too, if it found nothing."""
    for text in (
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
        "pickle.Unpickler(x)",
        "list(map(pickle.loads, x))",
        "marshal.loads(x)",
    ):
        path = tmp_path / "prog.py"
        path.write_text(text)
        assert mentions(path), text
    path.write_text("torch.load(x, weights_only=True); np.load(x); json.loads(x); pickle.dumps(x)")
    assert not mentions(path)
