"""The pages of docs/reference that the code makes, for readers of the repository; the site makes its own.

python scripts/docs_site/reference_pages.py --write    # renew them; a test compares
"""

import argparse
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import api_text
import command_page
from generated_pages import noted

from mpisgd import errors
from mpisgd.config import VARIABLES
from mpisgd.errors import anchor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).resolve().parents[2] / "docs"
SUITES = "reference/suites.md"
BEGIN, END = "<!-- generated: scripts/suites/suites.toml -->", "<!-- end of generated -->"


def pages() -> dict[str, str]:
    """The text of each page by its path in docs/."""
    made = {
        "reference/commands.md": command_page.page(),
        "reference/environment.md": environment_page(),
        "reference/errors.md": error_page(),
    }
    whole = {path: noted(text) for path, text in made.items()}
    return {**whole, **api_text.pages(), SUITES: with_suites((DOCS / SUITES).read_text())}


def with_suites(text: str) -> str:
    """The page of suites with what does not pass."""
    return f"{text.split(BEGIN)[0].rstrip()}\n\n{BEGIN}\n{suite_sections().rstrip()}\n\n{END}\n"


def main() -> int:
    """Write the pages, or print those that are stale; the exit code."""
    parser = argparse.ArgumentParser(description="The generated pages of docs/reference.")
    parser.add_argument("--write", action="store_true", help="write them instead of comparing")
    write = parser.parse_args().write
    stale = {path: text for path, text in pages().items() if _read(DOCS / path) != text}
    for path, text in stale.items():
        if write:
            (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / path).write_text(text)
        else:
            print(f"docs/{path} is not what the sources say")
    return 1 if stale and not write else 0


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


ENVIRONMENT = """# Environment variables

This page lists the environment variables that mpisgd reads, with their defaults. All ranks need the same
values, with two exceptions: only rank 0 reads the profile, and the timeline may be set on one rank only. An
invalid value raises [`InvalidArgument`](errors.md#invalid-argument) in `mpisgd.init()`.

Open MPI exports a variable to other hosts with `-x NAME`, MPICH with `-genv NAME VALUE`.
"""

# Where more is said, by variable.
MORE_OF_VARIABLES = {
    "MPISGD_TIMEOUT_S": "../how-to/hangs.md",
    "MPISGD_STALL_WARNING_S": "../how-to/hangs.md",
    "MPISGD_SHARED_MEMORY": "../concepts/transports.md",
    "MPISGD_CROSS_MEMORY": "../concepts/transports.md",
    "MPISGD_FULL_TRACEBACK": "../concepts/order-and-checks.md#different-calls",
    "MPISGD_CHECK_STAGING": "../internals/transports.md#transports-of-host-memory",
    "MPISGD_KEEP_MEMORY": "../how-to/performance.md#large-layers-on-cpus",
    "MPISGD_GPU": "../how-to/gpus.md",
    "MPISGD_PROFILE": "../concepts/transports.md#which-algorithm-auto-takes",
    "MPISGD_TIMELINE": "../how-to/timelines.md",
    "MPISGD_STEP_LOG": "../how-to/performance.md#ranks-or-threads-on-one-host",
    "MPISGD_STEP_LIMIT": "../how-to/performance.md#ranks-or-threads-on-one-host",
    "MPISGD_STALL_STACKS": "../how-to/timelines.md#stall-reports-of-horovods-api",
    "MPISGD_RESTART_COUNT": "../how-to/checkpoints.md#restarts-after-a-failure",
}
PREFIXES = {"MPISGD_": "mpisgd", "HOROVOD_": "Horovod's API", "": "Others"}


def environment_page() -> str:
    """The reference of environment variables, from the table in mpisgd/config.py."""
    text, left = ENVIRONMENT, list(VARIABLES)
    for prefix, title in PREFIXES.items():
        chosen = [variable for variable in left if variable.name.startswith(prefix)]
        left = [variable for variable in left if variable not in chosen]
        text += f"\n## {title}\n\n| variable | default | meaning |\n| --- | --- | --- |\n"
        for name, default, meaning in chosen:
            shown = f"[`{name}`]({MORE_OF_VARIABLES[name]})" if name in MORE_OF_VARIABLES else f"`{name}`"
            text += f"| {shown} | {default} | {meaning} |\n"
    return text


ERRORS = """# Errors

This page lists every exception that mpisgd raises on purpose: what it means, what usually causes it, and what
to do. All of them derive from `mpisgd.MpisgdError`, and each also from the builtin exception beside its name,
so `except ValueError` works. [Order and
checks](../concepts/order-and-checks.md) shows which mistake leads to which error.

The message of an error ends with the short name of its entry here: `[mpisgd:collective-timeout]`. In a
terminal, `mpisgd explain collective-timeout` prints the same.

"""


def error_page() -> str:
    """The catalogue of errors, from the docstrings of mpisgd/errors.py: one section per public class."""
    classes = [
        errors.MpisgdError,
        *(getattr(errors, name) for name in errors.__all__ if name != "MpisgdError"),
    ]
    table = "| error | means |\n| --- | --- |\n"
    table += "".join(f"| [{cls.__name__}](#{anchor(cls)}) | {_first_line(cls)} |\n" for cls in classes)
    return ERRORS + table + "\n" + "\n".join(map(_error, classes))


def _first_line(cls: type) -> str:
    return inspect.getdoc(cls).partition("\n")[0].rstrip(".")


def _error(cls: type) -> str:
    bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
    paragraphs = inspect.getdoc(cls).split("\n\n")
    for index, paragraph in enumerate(paragraphs):
        label, colon, rest = paragraph.partition(": ")
        if colon and label in ("Causes", "What to do"):
            paragraphs[index] = f"**{label}.** {rest[0].upper()}{rest[1:]}"
    missing = [
        label for label in ("Causes", "What to do") if not any(p.startswith(f"**{label}") for p in paragraphs)
    ]
    if missing:
        raise RuntimeError(
            f"mpisgd/errors.py: the docstring of {cls.__name__} has no {' and no '.join(missing)}"
        )
    body = "\n\n".join(paragraphs)
    return f'<a id="{anchor(cls)}"></a>\n\n## {cls.__name__}\n\nDerives from {bases}.\n\n{body}\n'


SUITES_FILE = Path(__file__).resolve().parents[1] / "suites" / "suites.toml"
KINDS = {"fails": "fails", "left_out": "not started"}


def suite_sections() -> str:
    """A section for each suite, with a row for each test that does not pass."""
    suites = tomllib.loads(SUITES_FILE.read_text())
    return "\n".join(_suite(name, table) for name, table in suites.items())


def _suite(name: str, table: Mapping[str, Any]) -> str:
    """The section of a suite."""
    rows = [
        f"| `{test}` | {KINDS[kind]} | {_at(reason)} | {_why(reason)} |"
        for kind in KINDS
        for test, reason in table[kind].items()
    ]
    if not rows:
        return f"\n## What does not pass: {name}\n\nNothing.\n"
    head = "| test | | ranks | reason |\n| --- | --- | --- | --- |"
    return f"\n## What does not pass: {name}\n\n{head}\n" + "\n".join(rows) + "\n"


def _at(reason: str | Mapping[str, Any]) -> str:
    """The numbers of ranks at which a reason holds."""
    return "all" if isinstance(reason, str) else ", ".join(map(str, reason["ranks"]))


def _why(reason: str | Mapping[str, Any]) -> str:
    """The reason as one line."""
    return reason if isinstance(reason, str) else reason["reason"]


if __name__ == "__main__":
    sys.exit(main())
