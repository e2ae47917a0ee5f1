"""What stands below a method in the API reference: its algorithm, all of it, as `paper.py` has it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import mpisgd

__all__ = ["PAPERS", "section_of"]

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
