"""The pages of the API reference: every public name, with its docstring, and below a method its paper.

The names are those of `mpisgd.__all__`, by the folder that defines them, and of the public subpackages. A
name of a folder without a page is an error: so no public name is left out.
"""

import ast
import importlib
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import torch

import mpisgd
from mpisgd.lazy_names import modules_of_names

METHODS = Path(mpisgd.__file__).parent / "methods"
KITS = ("paper_kit", "compression_kit")


def papers() -> dict[str, tuple[str, ...]]:
    """The folders of the papers, by the public name of the method: those that lie beside its description."""
    found = {}
    for package in (mpisgd, mpisgd.compress):
        for name, module in package._MODULE_OF.items():
            path = module.split(".")
            if path[:2] != ["mpisgd", "methods"] or path[-1] != path[-2]:
                continue
            folder = METHODS.joinpath(*path[2:-1])
            own = sorted(str(paper.parent.relative_to(METHODS)) for paper in folder.rglob("paper.py"))
            public = f"{package.__name__}.{name}"
            if own:
                found[public] = tuple(
                    dict.fromkeys([*own, *(other for each in own for other in _others(each))])
                )
    return found


def _others(folder: str) -> list[str]:
    """The folders of papers that the one in a folder depends on."""
    module = import_module(f"mpisgd.methods.{folder.replace('/', '.')}.paper")
    return [other for each in vars(module).values() for other in getattr(each, "depends_on", ())]


PAPERS = papers()


def section_of(name: str) -> str:
    """The papers of a public name, "" if it has none."""
    return "".join(_section(folder) for folder in PAPERS.get(name, ()))


def _section(folder: str) -> str:
    path = f"mpisgd/methods/{folder}/paper.py"
    text = (METHODS / folder / "paper.py").read_text()
    kits = [f"[{kit}](../../../mpisgd/methods/{kit}.py)" for kit in KITS if f".{kit} import" in text]
    return (
        f"**The algorithm, all of it**, with all ranks in one process, written with {' and '.join(kits)}: "
        f"[{path}](../../../{path}). Tests compare this method with it.\n\n```python\n{text}```\n\n"
    )


PACKAGE = Path(mpisgd.__file__).parent
FOLDER = "reference/api"

# Of the names of `mpisgd`: the page, its first paragraph, and the folders whose names it has.
GROUPS = {
    "Job": (
        "Starting and ending a job, the place of a process in it, groups of ranks, and what operations "
        "return.",
        ("job", "core"),
    ),
    "Training": (
        "The wrapper of an optimizer, functions for training loops of your own, seeds, and synchronous batch "
        "normalization.",
        ("optim", "optimizers", "nn", "data"),
    ),
    "Strategies": (
        "What the ranks exchange and how often: `strategy=` of `DistributedOptimizer`, and the base classes "
        "for one of your own.",
        ("strategies", "sharding"),
    ),
    "Compression": (
        "The form in which gradients are sent: the casts, and the base classes of a compressor. The "
        "other compressors are in [mpisgd.compress](mpisgd.compress.md).",
        ("compress", "compressors"),
    ),
    "Collectives": (
        "Operations that several ranks perform together, and messages from one rank to another.",
        ("collectives", "dtypes", "gossip", "rma"),
    ),
    "Layouts": (
        "Tensors that are divided among the ranks by the names of their dimensions, and sequences in parts.",
        ("layouts", "context"),
    ),
    "Diagnosis": (
        "Recordings of a run, and a comparison of distributed training with one process.",
        ("timeline", "tools"),
    ),
    "Exceptions": (
        "The exceptions of mpisgd. The [error catalogue](../errors.md) says what to do about each.",
        ("errors",),
    ),
}

# The public subpackages, and what each is for.
SUBPACKAGES = {
    "mpisgd.checkpoint": "Checkpoints: atomic, checksummed, loadable at any number of ranks.",
    "mpisgd.compress": "Compressors for `compression=` of `DistributedOptimizer`.",
    "mpisgd.data": "Data sets divided among the ranks.",
    "mpisgd.elastic": "Training that continues after the loss of a rank or a host.",
    "mpisgd.gossip": "Graphs of ranks and mixing matrices, for `Gossip` and `neighbor_all_reduce`.",
    "mpisgd.horovod": "Horovod's torch API.",
    "mpisgd.horovod.elastic": "Horovod's elastic API.",
    "mpisgd.integrations.accelerate": "Accelerate over MPI.",
    "mpisgd.integrations.lightning": "Lightning over MPI.",
    "mpisgd.metrics": "Numbers of a running job, for Prometheus and trackers of experiments.",
    "mpisgd.nn": "Modules that communicate.",
    "mpisgd.pipeline": "Pipelines: schedules as data, and a worker that executes them.",
    "mpisgd.tools.plan.prediction": "Predicted step times, as `python -m mpisgd plan` prints them.",
    "mpisgd.rpc": "torch's RPC over MPI.",
    "mpisgd.torch_backend": 'The backend "mpisgd" of `torch.distributed`.',
}

# Classes that nobody imports: their methods are shown as those of the public class that is made of them.
PARTS = {"Operations": "mpisgd.torch_backend.ProcessGroupMpisgd", "SavedState": "mpisgd.DistributedOptimizer"}

# Names without a docstring of ours, by module: what they are.
OTHERS = {
    "mpisgd.rpc": {
        "torch's own": (
            "DistributedOptimizer",
            "RRef",
            "TensorPipeRpcBackendOptions",
            "WorkerInfo",
            "dist_autograd",
            "functions",
        )
    },
    "mpisgd.horovod": {
        "reductions": ("Adasum", "Average", "Max", "Min", "Product", "Sum"),
        "modules": ("elastic", "mpi_ops"),
        "the process set of all ranks": ("global_process_set",),
    },
}


def pages() -> dict[str, str]:
    """The text of each page by its path in docs/, in the order of the navigation."""
    found = {}
    names = _names_by_folder()
    for title, (first, folders) in GROUPS.items():
        chosen = sorted(name for folder in folders for name in names.pop(folder, ()))
        found[f"{FOLDER}/{title.lower()}.md"] = _page(title, first, (f"mpisgd.{name}" for name in chosen))
    if names:
        raise RuntimeError(f"public names without a page of the API reference, see {__file__}: {names}")
    for module, first in SUBPACKAGES.items():
        others = OTHERS.get(module, {})
        ours = sorted(_all_of(module).difference(*others.values()))
        text = _page(module, first, (f"{module}.{name}" for name in ours))
        for what, borrowed in others.items():
            text += f"{what[0].upper()}{what[1:]}: {', '.join(f'`{name}`' for name in borrowed)}.\n\n"
        found[f"{FOLDER}/{module}.md"] = text
    return found


def documented_names() -> list[str]:
    """Every public name that the reference has, with its module."""
    pattern = re.compile(r'^(?:::: (\S+)\n(?:    .*\n)*\n|<span id="(\S+)">)', re.MULTILINE)
    names = [alone or moved for text in pages().values() for alone, moved in pattern.findall(text)]
    others = [
        f"{module}.{name}"
        for module, kinds in OTHERS.items()
        for borrowed in kinds.values()
        for name in borrowed
    ]
    return names + others


def _page(title: str, first: str, names: Iterable[str]) -> str:
    return f"# {title}\n\n{first}\n\n" + "".join(map(_entry, names))


def _entry(name: str) -> str:
    """What mkdocstrings makes the section of a name from; its anchor is the name as one imports it."""
    path = _defining(name)
    if path == name:
        options = "    options:\n      inherited_members: true\n" if name in PARTS.values() else ""
        return f"::: {name}\n{options}\n{section_of(name)}"
    return f'<span id="{name}"></span>\n\n::: {path}\n    options:\n      heading: "{name}"\n\n'


def _defining(name: str) -> str:
    """Where a name is defined; only for names that are imported by `*`, which Griffe does not follow."""
    module, _, last = name.rpartition(".")
    if module != "mpisgd.horovod":
        return name
    found = getattr(importlib.import_module(module), last)
    return f"{found.__module__}.{found.__qualname__}"


def _names_by_folder() -> dict[str, list[str]]:
    """The names of `mpisgd.__all__` by the folder, or the module, of the package that defines them."""
    found: dict[str, list[str]] = {}
    for name in mpisgd.__all__:
        found.setdefault(_folder_of(name), []).append(name)
    return found


def _folder_of(name: str) -> str:
    """The folder of the module that defines a name; of `methods` what kind of method it is."""
    _, folder, *inner = mpisgd._MODULE_OF[name].split(".")
    if folder != "methods":
        return folder
    value = getattr(mpisgd, name)
    if inner[0] == "strategy" or (isinstance(value, type) and issubclass(value, mpisgd.Strategy)):
        return "strategies"
    is_optimizer = isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    return "optimizers" if is_optimizer else "compressors"


def _all_of(module: str) -> set[str]:
    """`__all__` of a module, read without importing it: its frameworks need not be installed."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    if path.joinpath("__init__.pyi").exists():
        return set(modules_of_names(str(path / "__init__.py")))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    raise RuntimeError(f"{module} has no __all__")
