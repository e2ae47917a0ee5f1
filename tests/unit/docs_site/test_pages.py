"""The documentation has every page in its navigation, and every public name, variable, error and command."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import api_pages
import command_page
import pytest
import reference_pages
from generated_pages import is_generated

import mpisgd
from mpisgd import errors
from mpisgd.config import VARIABLES

ROOT = Path(__file__).resolve().parents[3]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not is_generated(page)]
# Set by the launcher of a job for its ranks, and by tests.
INTERNAL = {"MPISGD_RUN_NOTES", "MPISGD_ELASTIC_NEWCOMER", "MPISGD_TEST_OUTPUT"}
# Pages that reference_pages.py writes.
GENERATED = {"reference/commands.md", "reference/environment.md", "reference/errors.md"}
FROM_ROOT = {"changelog.md", "contributing.md"}


def prose(text: str) -> list[str]:
    """The paragraphs of a page that are sentences."""
    text = re.sub(r"<!--.*?-->|^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    parts = [part.strip() for part in text.split("\n\n")]
    return [part for part in parts if part and not re.match(r"[#|!<-]|\d+\. ", part)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_a_page_begins_with_what_it_is_for(page):
    title, _, rest = page.read_text().partition("\n\n")
    assert re.fullmatch(r"# [^\n]+", title)
    first = rest.split("\n\n")[0]
    assert prose(first) == [first.strip()]
    assert len(first.split()) >= 10


def test_every_page_is_in_the_navigation():
    nav = set(re.findall(r"- (?:\w+: )?([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    files = {str(page.relative_to(ROOT / "docs")) for page in PAGES}
    assert nav == files | GENERATED | FROM_ROOT


def test_the_generated_pages_are_what_the_sources_say():
    stale = [path for path, text in reference_pages.pages().items() if read(path) != text]
    assert not stale, f"run: python scripts/docs_site/reference_pages.py --write   (stale: {stale})"


def test_no_generated_page_is_left_over():
    there = {
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md") if is_generated(page)
    }
    assert there == reference_pages.pages().keys() - {"reference/suites.md"}
    assert there >= GENERATED


@pytest.mark.parametrize("path", sorted(api_pages.pages()))
def test_a_page_of_the_api_has_text_for_each_name(path):
    names = re.findall(r'^(?:::: (mpisgd\S+)|<span id="(\S+)">)', api_pages.pages()[path], re.MULTILINE)
    text = read(path)
    sections = dict(re.findall(r"^## (mpisgd\S*)\n\n(.*?)(?=^<a id|\Z)", text, re.DOTALL | re.MULTILINE))
    wanted = {alone or moved for alone, moved in names}
    moved = set(re.findall(r"</span>\n\n::: (\S+)$", api_pages.pages()[path], re.MULTILINE))
    assert sections.keys() == wanted - moved
    assert all(section.strip() for section in sections.values())
    assert ":::" not in text


def read(path: str) -> str:
    """A page of docs/."""
    file = ROOT / "docs" / path
    return file.read_text() if file.exists() else ""


def test_every_paper_stands_below_a_method():
    folder = ROOT / "mpisgd" / "methods"
    written = {str(path.parent.relative_to(folder)) for path in folder.rglob("paper.py")}
    assert written == {each for folders in api_pages.PAPERS.values() for each in folders}
    text = "".join(api_pages.pages().values())
    assert all((folder / each / "paper.py").read_text() in text for each in written)
    assert set(api_pages.PAPERS) <= set(api_pages.documented_names())


def test_every_public_name_is_in_the_reference():
    documented = set(api_pages.documented_names())
    assert {f"mpisgd.{name}" for name in mpisgd.__all__} <= documented
    for module in api_pages.SUBPACKAGES:
        if module.startswith("mpisgd.integrations."):
            continue  # needs the framework
        exported = importlib.import_module(module).__all__
        assert {f"{module}.{name}" for name in exported} <= documented


@pytest.mark.parametrize("name", sorted(mpisgd.__all__))
def test_every_public_name_has_a_docstring(name):
    found = getattr(mpisgd, name)
    assert (found.__doc__ or "").strip(), name


def test_every_variable_of_the_sources_is_in_the_table():
    found = set()
    for path in (ROOT / "mpisgd").rglob("*.py"):
        found |= set(re.findall(r"[\"'](MPISGD_[A-Z_]+|HOROVOD_[A-Z_]+)[\"']", path.read_text()))
    listed = {variable.name for variable in VARIABLES}
    assert found - INTERNAL <= listed
    assert {name for name in listed if name.startswith("MPISGD_")} <= found
    page = reference_pages.environment_page()
    assert all(f"`{name}`" in page for name in listed)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_an_anchor_with_causes_and_what_to_do(name):
    before, section = re.split(rf"^## {name}$", reference_pages.error_page(), flags=re.MULTILINE)
    assert before.endswith(f'<a id="{errors.anchor(getattr(errors, name))}"></a>\n\n')
    section = section.split("\n## ")[0]
    assert "**Causes.** " in section
    assert "**What to do.** " in section


def test_anchors_of_errors_are_short_names():
    assert errors.anchor(errors.CollectiveTimeout) == "collective-timeout"
    assert errors.anchor(errors.Deadlock) == "deadlock"
    anchors = [errors.anchor(getattr(errors, name)) for name in errors.__all__]
    assert len(set(anchors)) == len(anchors)


def test_every_command_is_in_the_reference_with_its_options():
    page = command_page.page()
    for command in ("bench step", "info", "memory", "plan", "run", "top", "trace", "tune", "verify"):
        assert f"\n## python -m mpisgd {command}\n" in page
    section = page.split("\n## python -m mpisgd run\n")[1].split("\n## ")[0]
    assert "`--restarts`" in section
    assert "PROGRAM [ARGS]..." in section
