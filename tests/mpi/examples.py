"""The programs of docs/how-to/extending.md, run as they stand there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "extending.md"


def example(name: str) -> dict[str, Any]:
    """Run the block that is marked with `name`; what it has defined. Collective: it trains."""
    found = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, name
    module = sys.modules[f"example_{name}"] = types.ModuleType(f"example_{name}")  # dataclasses look there
    exec(compile(found[1], f"{PAGE.name}: {name}", "exec"), module.__dict__)
    return module.__dict__
