"""The list of launched tests that run with --long only names tests that exist."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "launch"


def patterns() -> tuple[str, ...]:
    spec = spec_from_file_location("launch_conftest", FOLDER / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LONG


@pytest.mark.parametrize("pattern", patterns())
def test_a_pattern_names_a_test_that_is_there(pattern):
    file, _, name = pattern.partition("::")
    function = name.partition("[[]")[0]
    text = (FOLDER / file).read_text()
    assert function.startswith("*") or re.search(rf"^def {function}\(", text, re.MULTILINE)
