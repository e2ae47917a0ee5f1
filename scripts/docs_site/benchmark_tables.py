"""The files of benchmarks/ as sections of a page, each with its command, machine and picture."""

from __future__ import annotations

from measurements import all_measurements, as_markdown

__all__ = ["sections"]


def sections() -> str:
    """Every table of the folder, with what it was measured by and on."""
    text = ""
    for path, measured in all_measurements().items():
        picture = path.with_suffix(".png")
        shown = f"\n![{measured.title}](../benchmarks/{picture.name})\n" if picture.exists() else ""
        tables = "\n".join(f"**{t.title}**\n\n{as_markdown(t.columns, t.rows)}" for t in measured.tables)
        text += (
            f"### {path.stem}: {measured.title}\n\n{measured.provenance}.\n{shown}\n"
            f'<details markdown="1"><summary>Table</summary>\n\n{tables}\n</details>\n\n'
        )
    return text
