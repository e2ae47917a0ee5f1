"""The package's public names: one list of them, and an import that starts nothing."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import mpisgd


def test_the_stub_says_the_same_to_type_checkers_as_to_the_program():
    """`from x import y as y`: with another alias, or none, the two would differ."""
    stub = ast.parse(Path(mpisgd.__file__).with_suffix(".pyi").read_text())
    aliases = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases)
    assert sorted(alias.name for alias in aliases) == sorted(mpisgd._MODULE_OF)


def test_all_is_sorted_and_has_no_name_twice():
    assert list(mpisgd.__all__) == sorted(set(mpisgd.__all__))


@pytest.mark.parametrize("name", mpisgd.__all__)
def test_every_name_is_there_and_explained(name):
    value = getattr(mpisgd, name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert name in dir(mpisgd)
    for member_name, member in (
        inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else ()
    ):
        if not member_name.startswith("_") and member.__module__.startswith("mpisgd"):
            assert inspect.getdoc(member), f"{name}.{member_name} has no docstring"


def test_every_module_exports_what_it_is_the_home_of():
    for name in mpisgd.__all__:
        module = importlib.import_module(mpisgd._MODULE_OF[name])
        assert name in module.__all__, (module, name)


def test_subpackages_are_there_without_an_import_of_their_own():
    """In a new process: here other tests have imported them."""
    names = ("checkpoint", "compress", "data", "elastic", "gossip", "metrics", "nn", "pipeline", "rpc")
    program = f"import mpisgd; print([name for name in {names} if not hasattr(mpisgd, name)])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    assert set(names) <= set(dir(mpisgd))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'mpisgd' has no attribute 'allreduce'"):
        mpisgd.allreduce  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    ["import mpisgd", "import mpisgd.config, mpisgd.errors", "import mpisgd; mpisgd.JobError"],
)
def test_the_import_loads_neither_torch_nor_mpi(statement):
    program = f"{statement}; import sys; print({{'torch', 'mpi4py', 'numpy'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_functions_that_need_mpi_load_it_on_first_use_only():
    program = (
        "import mpisgd, sys\n"
        "mpisgd.all_reduce, mpisgd.init, mpisgd.Group, mpisgd.Work\n"
        "print('mpi4py.MPI' in sys.modules, mpisgd.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_a_plain_training_loads_no_method_that_it_has_not_asked_for():
    """Each rank of each job loads what `DistributedOptimizer` imports, before its first step."""
    program = (
        "import mpisgd, sys, torch\n"
        "param = torch.nn.Parameter(torch.ones(3))\n"
        "optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1))\n"
        "param.sum().backward()\n"
        "optimizer.step()\n"
        "others = ('sharding.offload', 'sharding.reduction.to_owners', 'methods.sharded.synchronizer', "
        "'methods.power_sgd', 'methods.diloco')\n"
        "print([name for name in others if f'mpisgd.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
