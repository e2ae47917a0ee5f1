"""The engine is handed its job: only functions that users call without a group ask for the current one."""

from __future__ import annotations

import ast
from pathlib import Path

import mpisgd

PACKAGE = Path(mpisgd.__file__).parent
ASKING = {"current_job", "world"}
FACES = {
    "elastic",  # run
    "horovod/basics.py",
    "horovod/process_sets.py",  # of an mpi4py communicator
    "horovod/state.py",  # hvd.init
    "job/groups.py",  # new_group
    "job/lifecycle.py",
    "job/rank_info.py",  # mpisgd.rank()
    "job/recovery.py",  # elastic.run and torch's reconfigure, after which there is another job
    "job/threads_as_ranks.py",  # lose_ranks
    "layouts/layout.py",
    "metrics/session.py",  # metrics.start
    "rpc/lifecycle.py",  # init_rpc
    "timeline/session.py",  # start_timeline
    "torch_backend/creation.py",
    "torch_backend/membership.py",  # reconfigure
}
TOOLS = "tools/"  # programs that run as a user's do


def asks(path: Path) -> bool:
    """Whether a module calls what returns the current job or its world."""
    called = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return any(getattr(func, "attr", getattr(func, "id", "")) in ASKING for func in called)


def test_only_faces_without_a_group_ask_for_the_job():
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    asking = {name for name, path in paths.items() if not name.startswith(TOOLS) and asks(path)}
    assert {"elastic" if name.startswith("elastic/") else name for name in asking} == FACES
