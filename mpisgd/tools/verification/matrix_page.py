"""Methods x situations as a page with a table to filter: one file, without anything from elsewhere."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mpisgd.tools.verification.matrix_report import LABELS, ORDER, PLAIN, kind_of, word_of
from mpisgd.tools.verification.method_matrix import Tried
from mpisgd.tools.verification.programs.program import parse
from mpisgd.tools.verification.programs.serial_definition import why_undefined

__all__ = ["write_page"]

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Methods in situations</title><style>
body { font: 14px sans-serif; margin: 1rem; }
table { border-collapse: collapse; margin-top: 0.6rem; }
td, th { border-bottom: 1px solid #ccc; padding: 0.2rem 0.6rem; text-align: left; vertical-align: top; }
th { cursor: pointer; position: sticky; top: 0; background: white; }
.equal { background: #2f8f4e; color: white; } .alone { background: #b7dfb0; }
.refused { background: #9db4cf; } .impossible { background: #e4e4e4; }
.wrong { background: #c8202f; color: white; }
</style></head><body>
<h1>Methods in situations</h1>
"""
SCRIPT = """
<script>
const rows = [...document.querySelectorAll("tbody tr")];
const fields = [...document.querySelectorAll("[data-column]")];
function show() {
  let shown = 0;
  for (const row of rows) {
    row.hidden = !fields.every(field =>
      row.cells[field.dataset.column].textContent.toLowerCase().includes(field.value.toLowerCase()));
    shown += !row.hidden;
  }
  document.getElementById("shown").textContent = `${shown} of ${rows.length}`;
}
fields.forEach(field => field.addEventListener("input", show));
document.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
  const body = document.querySelector("tbody"), text = row => row.cells[column].textContent;
  rows.sort((one, other) => text(one).localeCompare(text(other), undefined, {numeric: true}));
  rows.forEach(row => body.append(row));
}));
show();
</script></body></html>
"""


def write_page(found: Sequence[Tried], path: Path) -> None:
    """Write a row for each kind of method in each situation: what became of it, and why."""
    worst: dict[tuple[str, str], tuple[str, Tried]] = {}
    for tried in found:
        word = word_of(tried)
        for name in tried.situations or (PLAIN,):
            place = kind_of(tried.method), name
            if place not in worst or ORDER.index(word) > ORDER.index(worst[place][0]):
                worst[place] = word, tried
    rows = [_row(*place, *seen) for place, seen in worst.items()]
    words = "".join(f"<option value='{label}'>{label}</option>" for label in LABELS.values())
    filters = (
        "<p>Method <input data-column='0'> situation <input data-column='1'> "
        f"<select data-column='2'><option value=''>all outcomes</option>{words}</select> "
        "text <input data-column='4'> <span id='shown'></span></p>"
    )
    heads = "".join(f"<th>{head}</th>" for head in ("method", "situation", "outcome", "ranks", "in words"))
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{_joined(rows)}</tbody></table>"
    path.write_text(f"{HEAD}{filters}{table}{SCRIPT}")


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _row(method: str, situation: str, word: str, tried: Tried) -> str:
    program = parse(tried.program) if tried.program else None
    text = tried.text
    if word == "alone" and program is not None:
        text = why_undefined(program)
    ranks = "" if program is None else f"{program.ranks}{_hosts(program.ranks, program.ranks_per_host)}"
    text = re.sub(r"\[mpisgd:.*?\]", "", text).strip()
    cells = [method, situation, LABELS[word], ranks, text]
    classes = ["", "", f" class='{word}'", "", ""]
    return (
        "<tr>"
        + "".join(f"<td{c}>{html.escape(t)}</td>" for c, t in zip(classes, cells, strict=True))
        + "</tr>"
    )


def _hosts(ranks: int, each: int) -> str:
    count = -(-ranks // each) if each else 1
    return f" on {count} hosts" if count > 1 else ""
