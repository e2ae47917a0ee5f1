"""The package's public names: three lists that must agree, and an import that starts nothing."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import mpisgd


def names_for_type_checkers() -> dict[str, tuple[str, ...]]:
    """What `if TYPE_CHECKING:` imports, by module."""
    tree = ast.parse(Path(mpisgd.__file__).read_text())
    block = next(
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    )
    return {
        node.module: tuple(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }


def test_the_three_lists_of_names_agree():
    assert names_for_type_checkers() == mpisgd._HOMES
    assert sorted(name for names in mpisgd._HOMES.values() for name in names) == sorted(mpisgd.__all__)


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
    for module, names in mpisgd._HOMES.items():
        __import__(module)
        assert set(names) <= set(sys.modules[module].__all__), module


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
