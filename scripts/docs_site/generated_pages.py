"""Which pages of docs/ are written by `reference_pages.py`, and not by hand."""

from pathlib import Path

NOTE = "<!-- Generated from the sources: scripts/docs_site/reference_pages.py --write -->"


def noted(text: str) -> str:
    """The page with a line for those who want to edit it, below its first paragraph."""
    title, first, rest = text.split("\n\n", 2)
    return f"{title}\n\n{first}\n\n{NOTE}\n\n{rest.rstrip()}\n"


def is_generated(page: Path) -> bool:
    """Whether the whole page is generated."""
    return NOTE in page.read_text()
