"""`python -m mpisgd explain NAME`: the entry of an error in the catalogue, as a message ends with its name.

python -m mpisgd explain collective-timeout
python -m mpisgd explain Deadlock
"""

import difflib
import inspect

import typer

from mpisgd import errors
from mpisgd.errors import JobError, MpisgdError, anchor

__all__ = ["explain"]

PAGE = "docs/reference/errors.md"


def explain(
    name: str = typer.Argument(
        "", help="The name in [mpisgd:NAME], or that of the class; default: list all."
    ),
) -> None:
    """Say what an error means, what usually causes it, and what to do."""
    known = {anchor(kind): kind for kind in _kinds()}
    if not name:
        width = max(map(len, known))
        for short, kind in known.items():
            typer.echo(f"{short:{width}}  {_paragraphs(kind)[0].splitlines()[0].rstrip('.')}")
        return
    wanted = name.strip("[]").removeprefix("mpisgd:").lower()
    found = next((short for short, kind in known.items() if wanted in (short, kind.__name__.lower())), None)
    if found is None:
        close = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "without a name it lists all"
        raise JobError(f"explain: no error is called {name!r}; {hint}")
    kind = known[found]
    bases = ", ".join(base.__name__ for base in kind.__bases__)
    typer.echo("\n\n".join([f"{kind.__name__} ({bases})", *_paragraphs(kind)]))


def _kinds() -> list[type[MpisgdError]]:
    return [getattr(errors, name) for name in errors.__all__]


def _paragraphs(kind: type[MpisgdError]) -> list[str]:
    """Return the docstring of a class."""
    return (inspect.getdoc(kind) or "").split("\n\n")
