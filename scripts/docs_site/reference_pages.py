"""The pages of docs/reference that the code makes, for readers of the repository; the site makes its own.

python scripts/docs_site/reference_pages.py --write    # renew them; a test compares
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import api_text
import command_page
import environment_page
import error_page
import suites_page
from generated_pages import noted

__all__ = ["DOCS", "pages", "with_suites"]

DOCS = Path(__file__).resolve().parents[2] / "docs"
SUITES = "reference/suites.md"
BEGIN, END = "<!-- generated: scripts/suites/suites.toml -->", "<!-- end of generated -->"


def pages() -> dict[str, str]:
    """The text of each page by its path in docs/."""
    made = {
        "reference/commands.md": command_page.page(),
        "reference/environment.md": environment_page.page(),
        "reference/errors.md": error_page.page(),
    }
    whole = {path: noted(text) for path, text in made.items()}
    return {**whole, **api_text.pages(), SUITES: with_suites((DOCS / SUITES).read_text())}


def with_suites(text: str) -> str:
    """The page of suites with what does not pass."""
    return f"{text.split(BEGIN)[0].rstrip()}\n\n{BEGIN}\n{suites_page.sections().rstrip()}\n\n{END}\n"


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


if __name__ == "__main__":
    sys.exit(main())
