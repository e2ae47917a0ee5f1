"""`python -m mpisgd.horovod`, in this process: what it runs finds what plain Python gives it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

import pytest

import mpisgd.horovod as hvd
from mpisgd.horovod.shim import finder, program


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a command line in a folder, and put everything back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield lambda *argv: program.main(list(argv))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("horovod", "package", "beside")]:
        del sys.modules[name]


def test_a_scripts_exit_code_arguments_and_names_are_its_own(run, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "beside.py").write_text("")
    (tmp_path / "below" / "script.py").write_text(
        "import sys, beside\nclass Mine: pass\nassert sys.modules[Mine.__module__].Mine is Mine\n"
        "assert sys.argv == ['below/script.py', '-m', '--help'] and __name__ == '__main__'\nsys.exit(7)"
    )
    with pytest.raises(SystemExit) as end:
        run("below/script.py", "-m", "--help")
    assert end.value.code == 7


@pytest.mark.parametrize("name", ["package.part", "package"])
def test_a_module_knows_its_name_and_package(run, tmp_path, name):
    (tmp_path / "package").mkdir()
    for file in ("__init__", "part", "__main__"):
        (tmp_path / "package" / f"{file}.py").write_text("from . import __path__\nspec = __spec__\n")
    run("-m", name, "--its")
    main = sys.modules["__main__"]
    assert main.spec.name == ("package.__main__" if name == "package" else name)
    assert main.__package__ == "package"
    assert sys.argv == [main.__file__, "--its"]


@pytest.mark.parametrize(
    ("text", "frames"), [("x = = 1", []), ("def f():\n    raise OSError\n\nf()", ["<module>", "f"])]
)
def test_tracebacks_begin_where_the_script_does(run, tmp_path, monkeypatch, text, frames):
    (tmp_path / "script.py").write_text(text)
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, exc, trace: shown.append((exc, trace)))
    with pytest.raises((SyntaxError, OSError)) as caught:
        run("script.py")
    sys.excepthook(caught.type, caught.value, next_frame_of(caught.tb))
    ((exc, trace),) = shown
    assert exc.__traceback__ is trace
    names = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names == frames


def next_frame_of(trace):
    """Leave out the frames of this test, as there are none in the real program."""
    while trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing to run"),
        (["--verbose", "-m"], "nothing to run"),
        (["--loud", "script.py"], "unknown option --loud"),
        (["nowhere.py"], "No such file"),
        (["-m", "nowhere"], "no module named nowhere"),
        (["-m", "nowhere.at.all"], "no module named nowhere.at.all"),
    ],
)
def test_what_cannot_run_is_refused(run, capsys, argv, said):
    with pytest.raises(SystemExit) as end:
        run(*argv)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_what_a_module_fails_to_import_is_not_called_missing_itself(run, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import no_such_thing")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        run("-m", "package.part")


def test_horovods_names_mean_our_modules(run, tmp_path):
    spec = hvd.__spec__
    (tmp_path / "script.py").write_text(
        "import horovod.torch as hvd\nfrom horovod.torch import SyncBatchNorm"
    )
    run("script.py")
    assert sys.modules["__main__"].hvd is hvd
    for name, ours in finder.ALIASES.items():
        assert importlib.import_module(name) is sys.modules[ours]
    assert hvd.__spec__ is spec
    assert importlib.util.find_spec("horovod.torch").name == "mpisgd.horovod"
    for name in ("horovod.tensorflow", "horovod.torch.other", "horovod.runner", "horovod.common.other"):
        with pytest.raises(ModuleNotFoundError, match=f"{name} is not there.* mpirun") as caught:
            importlib.import_module(name)
        assert caught.value.name == name
    with pytest.raises(NotImplementedError, match="mpirun -n NUM_PROC"):
        sys.modules["horovod"].run(print, np=2)


def test_to_install_twice_is_to_install_once(run):
    finder.install()
    before = (list(sys.meta_path), list(sys.path), os.environ["PYTHONPATH"])
    finder.install()
    assert (sys.meta_path, sys.path, os.environ["PYTHONPATH"]) == before


def test_helpers_of_common_util(run, monkeypatch):
    finder.install()
    util = importlib.import_module("horovod.common.util")
    assert util.split_list(list(range(7)), 5) == [[0, 1], [2, 3], [4], [5], [6]]
    assert [n for n in range(10) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert (util.mpi_built(), util.gloo_built(), util.extension_available("torch")) == (True, False, True)
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.mxnet is not there"):
        util.check_extension("horovod.mxnet")
    monkeypatch.setenv("LEFT_OUT", "1")
    monkeypatch.delenv("ADDED", raising=False)
    with util.env(ADDED="2", LEFT_OUT=None):
        assert (os.environ.get("ADDED"), os.environ.get("LEFT_OUT")) == ("2", None)
    assert (os.environ.get("ADDED"), os.environ.get("LEFT_OUT")) == (None, "1")
