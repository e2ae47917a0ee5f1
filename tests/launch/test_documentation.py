"""Every code block of README.md and docs/ runs, or says why not; commands have only options that exist."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import progress
import pytest
from blocks import CODE, ROOT, Block, blocks, commands_of, pages
from command_page import programs
from launcher import ENVIRONMENT, python, run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROGRAM = Path(__file__).parent / "programs" / "documentation.py"
BY_PAGE = {str(page.relative_to(ROOT)): blocks(page) for page in pages()}
CODE_BLOCKS = [block for found in BY_PAGE.values() for block in found if block.language in CODE]
# What pages call "your program", where they do not show one.
YOUR_PROGRAM = """
import sys
import torch
import mpisgd

mpisgd.init()
model = torch.nn.Linear(64, 10)
mpisgd.broadcast_parameters(model)
optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""


def python_blocks(*, long: bool, num_ranks: int = 2) -> list[Block]:
    """Blocks that run in one job; where an earlier block of a page is long, its later ones are, too."""
    found = []
    for on_page in BY_PAGE.values():
        page_is_long = False
        for block in on_page:
            if block.language != "python" or block.title or not block.is_run:
                continue
            if int(block.markers.get("ranks", 2)) != num_ranks:
                continue
            page_is_long |= "long" in block.markers
            if page_is_long == long:
                found.append(block)
    return found


def run_blocks(chosen: list[Block], num_ranks: int, folder: Path) -> None:
    done = run_python(
        str(PROGRAM),
        str(folder),
        *(block.where for block in chosen),
        num_ranks=num_ranks,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_block_is_accounted_for(capsys):
    """Prints the numbers; and what is saved is named by a command, what is TOML can be read."""
    kinds = Counter()
    for block in CODE_BLOCKS:
        kinds[kind_of(block)] += 1
        reason = [block.markers[name] for name in ("not run", "options only") if name in block.markers]
        assert all(reason), f"{block.where}: the reason is missing"
        if block.title and block.language == "python":
            later = [b.text for b in BY_PAGE[block.page] if b.language == "bash" and b.is_run]
            assert any(block.title in text for text in later), f"{block.where}: {block.title} is never run"
        if block.language == "toml":
            tomllib.loads(block.text)
    with capsys.disabled():
        said = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        print(f"\ndocumentation: {len(CODE_BLOCKS)} code blocks: {said}")


def kind_of(block: Block) -> str:
    if "not run" in block.markers:
        return "not run"
    if "options only" in block.markers:
        return "of commands whose options are checked"
    if block.language == "python":
        return "of Python, run by commands" if block.title else "of Python, run on two ranks"
    if block.language == "toml":
        return "of TOML, read"
    return "of commands, run" if "quick" in block.markers else "of commands, run with --long"


def test_fragments_of_python_run(tmp_path):
    run_blocks(python_blocks(long=False), 2, tmp_path)


@pytest.mark.long
def test_longer_fragments_of_python_run(tmp_path):
    run_blocks(python_blocks(long=True), 2, tmp_path)


@pytest.mark.long
def test_fragments_for_four_ranks_run(tmp_path):
    run_blocks(python_blocks(long=False, num_ranks=4), 4, tmp_path)


def page_folder(folder: Path, on_page: list[Block]) -> Path:
    """A folder with what a page saves, and with what a reader has beside it."""
    for name in ("scripts", "hostfiles", "tests", "benchmarks", "mpisgd"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "scratch").mkdir()
    (folder / "hosts").write_text("localhost slots=16\n")
    for name in ("train.py", "program.py"):
        (folder / name).write_text(YOUR_PROGRAM)
    for block in (*BY_PAGE["docs/how-to/plan.md"], *on_page):
        if name := block.title or block.markers.get("saved"):
            (folder / name).write_text(block.text)
    return folder


def run_commands(chosen: list[Block], folder: Path) -> None:
    """Run blocks of commands of one page, one after the other."""
    page_folder(folder, BY_PAGE[chosen[0].page])
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PATH": os.pathsep.join(
            [*(str(Path(name).parent) for name in (python(), sys.executable)), os.environ["PATH"]]
        ),
        "PYTHONPATH": str(ROOT),
    }
    for block in chosen:
        text = block.text.replace("/scratch", str(folder / "scratch"))
        # These scripts set the environment up, and then execute the programs.
        text = text.replace("./scripts/cluster", f"python {ROOT}/scripts/emulation/virtual_cluster.py")
        faults = f"python {ROOT}/scripts/fault_injection/fault_rounds.py"
        text = text.replace(
            "./scripts/faults", f"PYTHONPATH={ROOT}:{ROOT}/scripts:{ROOT}/scripts/testing {faults}"
        )
        fuzz = f"PYTHONPATH={folder}:{ROOT}:{ROOT}/scripts python -m fuzzing.main"
        text = text.replace("./scripts/fuzz", fuzz)
        done = progress.run(["bash", "-euo", "pipefail", "-c", text], env=environment, cwd=folder)
        expected = int(block.markers.get("exit code", 0))
        assert done.returncode == expected, f"{block.where}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def of_commands(*, quick: bool) -> list[pytest.param]:
    """The blocks of commands by page, as parameters of a test."""
    found = []
    for page, on_page in BY_PAGE.items():
        chosen = [b for b in on_page if b.language == "bash" and b.is_run and ("quick" in b.markers) == quick]
        if chosen:
            found.append(pytest.param(chosen, id=page, marks=() if quick else pytest.mark.long))
    return found


@pytest.mark.parametrize("chosen", of_commands(quick=True))
def test_commands_run(chosen, tmp_path):
    run_commands(chosen, tmp_path)


@pytest.mark.parametrize("chosen", of_commands(quick=False))
def test_longer_commands_run(chosen, tmp_path):
    run_commands(chosen, tmp_path)


def test_hello_is_one_program_and_prints_what_pages_show(tmp_path):
    """On all pages; whoever follows one must see what it shows."""
    programs = {block.text for found in BY_PAGE.values() for block in found if block.title == "hello.py"}
    assert len(programs) == 1
    shown = {b.text for found in BY_PAGE.values() for b in found if "first weight" in b.text and not b.title}
    assert len(shown) == 1
    program = tmp_path / "hello.py"
    program.write_text(programs.pop())
    done = run_python(str(program), num_ranks=4, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(shown.pop().splitlines())


# --- options ------------------------------------------------------------------------------------------


def all_commands() -> list[tuple[str, str]]:
    """Where each command of the blocks, and of the code within sentences, stands, and its text."""
    found = [(b.where, line) for b in CODE_BLOCKS if b.language == "bash" for line in commands_of(b)]
    for page in pages():
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            found.append((str(page.relative_to(ROOT)), code))
    return found


def arguments_of(command: str) -> tuple[str, list[str]] | None:
    """A program of ours in a command line, and its arguments; None if there is none, or some are left out."""
    if "..." in command or "[" in command:
        return None
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    for i, word in enumerate(words):
        if words[i : i + 2] == ["-m", "mpisgd"]:
            return "python -m mpisgd", words[i + 2 :]
        if word in ("scripts/train.py", "scripts/train_text.py"):
            return f"python {word}", words[i + 1 :]
    return None


def test_options_of_commands_exist():
    """Each program's own parser reads the arguments that the documentation gives it; nothing is run."""
    parsers, num_read, wrong = programs(), 0, []
    for where, command in all_commands():
        found = arguments_of(command)
        if found is None or not found[1]:
            continue
        parser, arguments = parsers[found[0]], found[1]
        while arguments and arguments[0] in getattr(parser, "commands", {}):
            parser, arguments = parser.commands[arguments[0]], arguments[1:]
        try:
            parser.make_context("", list(arguments))
        except Exception as exc:
            # A sentence may leave out what is not its subject.
            if type(exc).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
                wrong.append(f"{where}: {command}: {type(exc).__name__}: {exc}")
        num_read += 1
    assert not wrong, "\n".join(wrong)
    assert num_read > 50
