"""The code blocks of README.md and docs/, and what their markers say.

A marker is an HTML comment on the line before a block; several are separated by `;`:

    <!-- not run: needs a Slurm cluster -->     the reason; neither run nor checked
    <!-- options only: takes ten minutes -->    the commands are read by their own parsers, and not run
    <!-- quick -->                              a block of commands that also runs without --long
    <!-- long -->                               a block of Python that runs with --long only
    <!-- exit code: 1 -->                       of a block of commands
    <!-- ranks: 4 -->                           of a block of Python; 2 without it
    <!-- rank 0 -->                             a block of Python that rank 0 alone runs
    <!-- test: NAME -->                         another test takes the block, too
    <!-- saved: NAME -->                        it is saved, too, for the commands of the page

`<!-- setup`, lines of Python and `-->` before a block run before it, and are not shown. A block with a title
is saved under it, and run by the commands that name it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from generated_pages import is_generated

__all__ = ["ROOT", "Block", "blocks", "commands_of", "pages"]

ROOT = Path(__file__).resolve().parents[2]
MARKERS = {
    "not run",
    "options only",
    "quick",
    "long",
    "exit code",
    "ranks",
    "rank 0",
    "test",
    "saved",
}
# Languages of blocks that show something else than code to run.
SHOWN = {"text", "json", "yaml", "console", "html"}
CODE = {"python", "bash", "toml"}
FENCE = re.compile(
    r"(?P<comments>(?:^<!--(?:(?!-->).)*-->\n)*)^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[^\S\n]*$",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: its path in the repository.
        line: of its first line of code, from 1 on.
        language: one of CODE or SHOWN.
        title: the file as which it is saved, or "".
        text: the code.
        setup: Python that runs before it.
        markers: their values by their names.
    """

    page: str
    line: int
    language: str
    title: str
    text: str
    setup: str = ""
    markers: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The page and the line, as compilers say it."""
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether it is more than looked at."""
        return not {"not run", "options only"} & set(self.markers)


def pages() -> list[Path]:
    """README.md and all pages of docs/."""
    written = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not is_generated(page)]
    return [ROOT / "README.md", *written]


def blocks(path: Path) -> list[Block]:
    """The blocks of a page in their order."""
    text = path.read_text()
    return [_block(found, text, str(path.relative_to(ROOT))) for found in FENCE.finditer(text)]


def _block(found: re.Match[str], text: str, page: str) -> Block:
    line = text.count("\n", 0, found.start("text")) + 1
    language, _, rest = found["info"].strip().partition(" ")
    title = re.fullmatch(r'(?:title="([^"]+)")?', rest.strip())
    assert title is not None, f"{page}:{line}: {found['info']!r}"
    assert language in CODE | SHOWN, f"{page}:{line}: a block of {language or 'no language'}"
    setup, markers = "", {}
    for comment in COMMENT.findall(found["comments"]):
        if comment.lstrip().startswith("setup\n"):
            setup += comment.lstrip().removeprefix("setup\n")
            continue
        for marker in comment.split(";"):
            name, _, value = marker.strip().partition(": ")
            assert name in MARKERS, f"{page}:{line}: marker {name!r}"
            markers[name] = value
    return Block(page, line, language, title[1] or "", found["text"], setup, markers)


def commands_of(block: Block) -> list[str]:
    """The lines of a block of commands, with continued ones joined and without comments."""
    joined = block.text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#(?!!).*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]
