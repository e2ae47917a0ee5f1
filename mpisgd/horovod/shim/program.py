"""Run a script or a module as plain Python would, with the import hook installed."""

import builtins
import importlib.util
import io
import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

from mpisgd.config import launcher_rank
from mpisgd.horovod.shim.finder import install

__all__ = ["main"]

USAGE = """\
usage: python -m mpisgd.horovod [--verbose] SCRIPT [ARG ...]
       python -m mpisgd.horovod [--verbose] -m MODULE [ARG ...]

Runs a program that imports horovod.torch, unchanged, on mpisgd. On several ranks: under mpirun.

  --verbose  say which module `horovod` is\
"""

OURS = (__file__, os.path.join(os.path.dirname(os.path.dirname(__file__)), "__main__.py"))


class Call(NamedTuple):
    """What the command line asks for.

    Attributes:
        target: a file, or a module's name.
        is_module: which of them.
        args: the program's own.
        verbose: whether to say what is done.
    """

    target: str
    is_module: bool
    args: list[str]
    verbose: bool


def main(argv: list[str]) -> None:
    """Run what the command line says."""
    call = _parse(argv)
    if call.verbose and launcher_rank() in (None, 0):
        real = PathFinder.find_spec("horovod")
        instead = f", not {os.path.dirname(real.origin)}" if real is not None and real.origin else ""
        text = f"mpisgd.horovod: horovod.torch is mpisgd.horovod in {call.target}{instead}"
        print(text, file=sys.stderr, flush=True)
    install()
    try:
        _run(call)
    except BaseException:
        sys.excepthook = _Unframed(sys.excepthook)
        raise


def _run(call: Call) -> None:
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    code = _module_code(call, module) if call.is_module else _script_code(call, module)
    sys.modules["__main__"] = module
    sys.argv = [code.co_filename if call.is_module else call.target, *call.args]
    exec(code, module.__dict__)


def _parse(argv: list[str]) -> Call:
    rest = list(argv)
    verbose = is_module = False
    while rest and rest[0].startswith("-") and not is_module:
        option = rest.pop(0)
        if option in ("-h", "--help"):
            print(USAGE)
            sys.exit(0)
        if option not in ("-m", "-v", "--verbose"):
            _refuse(f"unknown option {option}; see --help")
        verbose = verbose or option != "-m"
        is_module = option == "-m"
    if not rest:
        _refuse("nothing to run; see --help")
    return Call(rest[0], is_module, rest[1:], verbose)


def _refuse(text: str) -> NoReturn:
    print(f"mpisgd.horovod: error: {text}", file=sys.stderr)
    sys.exit(2)


def _script_code(call: Call, module: ModuleType) -> CodeType:
    """Return the code of a file, and let the module and sys.path be as if Python had been given that file."""
    path = os.path.abspath(call.target)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as exc:
        _refuse(f"can't open file {path!r}: {exc.strerror}")
    module.__file__, module.__loader__ = path, SourceFileLoader("__main__", path)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    return compile(source, path, "exec", dont_inherit=True)


def _module_code(call: Call, module: ModuleType) -> CodeType:
    """Return the code of a module, or of a package's `__main__`, and let `module` be it."""
    spec = _find(call.target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{call.target}.__main__")
    code = None if spec is None else getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if spec is None or code is None:
        _refuse(f"no module named {call.target}, or nothing of it that can run")
    module.__spec__, module.__loader__ = spec, spec.loader
    module.__file__, module.__package__ = spec.origin, spec.parent
    assert isinstance(code, CodeType)
    return code


def _find(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as exc:  # of what it lies in, or of what that imports
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        return None


class _Unframed:
    """An exception hook that shows no frames of ours: a traceback begins where the program does."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and _is_ours(trace.tb_frame):
            trace = trace.tb_next
        self._hook(kind, exc.with_traceback(trace), trace)


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame is one of ours, or of `python -m`."""
    return frame.f_code.co_filename in OURS or frame.f_globals.get("__name__") == "runpy"
