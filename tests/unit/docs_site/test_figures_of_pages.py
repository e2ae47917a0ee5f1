"""Every figure of the pages comes from a file of benchmarks/; one that does not is named."""

from __future__ import annotations

from datetime import date

import pytest
from figures import problems, with_figures
from measurements import all_measurements, parse
from quantities import quantities

FILE = """# Training steps

- command: `mpirun -n 2 python -m mpisgd bench step`
- machine: a processor, 2 cores
- versions: torch 2.13.0
- date: 2026-11-23
- note: of a quiet machine
- missing: horovod

## training step

| model | variant | median | max |
| --- | --- | --- | --- |
| mlp | mpisgd | 106 ms | 242 ms |
| mlp | one process | 83.8 ms | 202 ms |
| deep | mpisgd | 40.9 ms | 52.6 ms |
"""
PAGE = """# Speed

A step takes some time.

<!-- generated: benchmarks/step-2.md
columns: variant, median
rows: mlp
rows: mpisgd | one process -->
<!-- end of generated -->
"""
ALLOWED = '[limit]\nreason = "set by the code"\n"docs/speed.md" = ["5 ms"]\n'


@pytest.fixture
def root(tmp_path):
    """A repository of one page, whose table is the file's."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"):
        (tmp_path / name).write_text("# A page\n")
    (tmp_path / "benchmarks" / "step-2.md").write_text(FILE)
    (tmp_path / "not_measured.toml").write_text("")
    write(tmp_path, PAGE)
    return tmp_path


def write(root, text):
    """Put a page there, with the tables of the files."""
    page = root / "docs" / "speed.md"
    page.write_text(with_figures(text, page, all_measurements(root / "benchmarks"), root))


def found(root):
    return problems(root, root / "not_measured.toml")


def test_the_pages_of_this_repository_have_a_source_for_every_figure():
    assert problems() == []


def test_a_page_has_the_columns_and_rows_that_it_asks_for_and_where_they_are_from(root):
    assert found(root) == []
    text = (root / "docs" / "speed.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table == [
        "| variant | median |",
        "| --- | --- |",
        "| mpisgd | 106 ms |",
        "| one process | 83.8 ms |",
    ]
    for told in (
        "bench step`",
        "2 cores",
        "torch 2.13.0",
        "2026-11-23",
        "quiet",
        "(../benchmarks/step-2.md)",
    ):
        assert told in text
    assert "horovod" not in text


@pytest.mark.parametrize(
    ("sentence", "figure"),
    [
        ("A step takes 12 ms.", "12 ms"),
        ("- A step takes\n  12\n  ms.", "12 ms"),
        ("One `tick. It takes 12 ms.\n\nAnother `tick.", "12 ms"),
        ("It is 1.03 x the limit.", "1.03 x"),
        ("It moves 3.4 GB/s.", "3.4 GB/s"),
        ("It trains on 1,200 examples per second.", "1,200 examples per second"),
        ("It takes 12 ms/step.", "12 ms"),
        ("It takes `12 ms` of a core.", "12 ms"),
        ("## 12 ms faster", "12 ms"),
        ("It saves 45 % of a core.", "45 %"),
        ("It is 2.5 times faster.", "2.5 times faster"),
        ("It is three times as fast.", "three times as"),
        ("It takes twice as long.", "twice as long"),
        ("It takes half the memory.", "half the memory"),
        ("It takes about 0.7 of Horovod's time.", "0.7"),
        ("It takes 200 to 300 us.", "200 to 300 us"),
        ("101 of 101 starts succeed.", "101 of 101"),
        ("The difference is 2.8e-01.", "2.8e-01"),
        ("With Horovod 0.28.1 it takes 7 µs.", "7 µs"),
        ("It is called by MPI 20 times per second.", "20 times per second"),
        ("This is of torch 1.53 x the time.", "1.53 x"),
        ("It takes half a second.", "half a second"),
        ("- in a list, `code`: 9 s", "9 s"),
        ("| tests | 451 passed |", "451 passed"),
        ("| steps | 24 |", "24"),
    ],
)
def test_a_figure_that_somebody_writes_is_found(root, sentence, figure):
    write(root, f"{PAGE}\n{sentence}\n")
    (line,) = found(root)
    place, _, told = line.partition(" ")
    assert place.startswith("docs/speed.md:")
    assert told == f"{figure!r} has no source"


@pytest.mark.parametrize(
    "text",
    [
        "```text\na step: 12 ms\n```",
        "`--rate 100mbit --limit 2.5`",
        "Open MPI 5.0.11 and torch 2.7 to 2.12, Lightning 2.5 and 2.6",
        "[a link](page-2.5.md)",
        "Ranks 0 to 3 of one host, a tensor of 2^31 elements, rank 2 of 4, 604 small tensors, a second call",
        "| a method | (p - 1) / p | 1 |",
        "<!-- 12 ms -->",
    ],
)
def test_what_is_no_measurement_is_left_alone(text):
    assert quantities(text) == []


def test_a_file_that_was_measured_again_is_not_on_the_page_yet(root):
    (root / "benchmarks" / "step-2.md").write_text(FILE.replace("106 ms", "99.0 ms"))
    assert [line.partition(":")[0] for line in found(root)] == ["docs/speed.md"]
    write(root, (root / "docs" / "speed.md").read_text())
    assert found(root) == []
    assert "99.0 ms" in (root / "docs" / "speed.md").read_text()


def test_a_table_that_was_changed_by_hand_is_found(root):
    page = root / "docs" / "speed.md"
    page.write_text(page.read_text().replace("106 ms", "16 ms"))
    assert [line.partition(":")[0] for line in found(root)] == ["docs/speed.md"]


def test_what_is_no_measurement_is_allowed_with_the_reason_and_only_where_it_stands(root):
    write(root, f"{PAGE}\nIt polls for 5 ms.\n")
    assert len(found(root)) == 1
    (root / "not_measured.toml").write_text(ALLOWED)
    assert found(root) == []
    (root / "README.md").write_text("# A page\n\nIt polls for 5 ms.\n")
    assert found(root) == ["README.md:3: '5 ms' has no source"]
    (root / "README.md").write_text("# A page\n")
    write(root, PAGE)
    assert found(root) == ["not_measured.toml: docs/speed.md has no '5 ms' any more"]
    (root / "not_measured.toml").write_text(ALLOWED.replace("set by the code", " "))
    with pytest.raises(ValueError, match="no reason"):
        found(root)


@pytest.mark.parametrize("name", ["command", "machine", "versions", "date"])
def test_a_file_says_where_its_numbers_come_from(root, name):
    lines = FILE.splitlines(keepends=True)
    (root / "benchmarks" / "step-2.md").write_text(
        "".join(line for line in lines if not line.startswith(f"- {name}:"))
    )
    assert found(root) == [f"benchmarks/step-2.md: no line '- {name}: ...' above the tables"]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("step-2.md", "step-3.md", "there is no such file"),
        ("variant, median", "variant, mode", "no column mode"),
        ("rows: mlp", "rows: mlp | cnn", "no row has cnn"),
        ("columns:", "colums:", "unknown: colums"),
        ("columns:", "table: memory\ncolumns:", "table 'memory': expected one of: training step"),
    ],
)
def test_a_page_that_asks_for_what_is_not_there_is_told(root, before, after, told):
    with pytest.raises(ValueError, match=told):
        write(root, PAGE.replace(before, after))


def test_a_block_of_nobody_and_a_raw_record_are_found(root):
    write(root, f"{PAGE}\n<!-- generated: mine.py -->\n12 ms\n<!-- end of generated -->\n")
    (root / "benchmarks" / "step-2.json").write_text("{}")
    assert found(root) == [
        "docs/speed.md:20: '12 ms' has no source",
        "benchmarks/step-2.json: a raw record; scripts/bench/record_table.py makes a table of it",
    ]


def test_a_file_that_was_read_is_written_as_it_was():
    for path, measured in all_measurements().items():
        assert measured.text == path.read_text(), path.name
        assert date.fromisoformat(measured.all_of("date")[0]) >= date(2026, 11, 20)
    assert parse(FILE).text == FILE
