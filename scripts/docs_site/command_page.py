"""The reference of commands, from the Typer applications: their help, arguments and options."""

import enum
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

SCRIPTS = Path(__file__).resolve().parents[1]

FIRST = """# Commands

This page lists the commands of mpisgd with all their arguments and options, as `--help` prints them. Commands
that need a job run under `mpirun`; the others start one themselves or need none.

"""


def programs() -> dict[str, Any]:
    """The command of each program, by what one types."""
    from mpisgd.tools.cli.main import app

    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    found = {"python -m mpisgd": typer.main.get_command(app)}
    for name in ("train", "train_text"):
        module = __import__(name)
        found[f"python scripts/{name}.py"] = typer.main.get_command(module.app)
    return found


def page() -> str:
    """The text of the page."""
    return FIRST + "\n".join(
        section for name, command in programs().items() for section in _sections(name, command)
    )


def _sections(name: str, command: Any) -> Iterator[str]:
    """A section for a command, and one for each of its subcommands."""
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        yield _section(name, command)
    for sub, inner in sorted(subcommands.items()):
        yield from _sections(f"{name} {sub}", inner)


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join([name, *["[OPTIONS]"] * bool(options), *map(_metavar, arguments)])
    text = f"## {name}\n\n```text\n{usage}\n```\n\n{_help(command.help or '')}\n"
    rows = [(f"`{_metavar(p)}`", p) for p in arguments] + [(_option(p), p) for p in options]
    if rows:
        text += "\n| argument or option | default | meaning |\n| --- | --- | --- |\n"
        text += "".join(
            f"| {shown} | {_default(p)} | {_cell(getattr(p, 'help', '') or '')} |\n" for shown, p in rows
        )
    return text


def _help(text: str) -> str:
    """The help of a command; what is indented in it are examples."""
    return inspect.cleandoc(text).replace("\b\n", "")


def _metavar(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names if option.is_flag else f"{names} {_cell(option.metavar or _kind(option))}"


def _kind(option: Any) -> str:
    """What an option takes: the names of an enumeration, or a type."""
    kind = option.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(member.value for member in kind)
    return getattr(kind, "__name__", str(kind)).lower()


def _default(param: Any) -> str:
    value = param.default
    if value is None or callable(value) or value in ((), [], ""):
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return f"`{_cell(str(getattr(value, 'value', value)))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
