"""Write which methods are refused in which situations: mpisgd/tools/verification/refused_pairs.txt.

    python -m mpisgd verify --json runs/verify.json
    python -m mpisgd verify --quick --json runs/quick.json     # on other ranks and hosts
    python scripts/checking/refused_pairs.py runs/verify.json runs/quick.json

`verify` calls a refusal that is not in that file a fault. A line that is longer than before needs a reason: a
fault that was shown.
"""

import json
import sys
from pathlib import Path

from mpisgd.tools.verification.method_matrix import Tried
from mpisgd.tools.verification.refusals import KNOWN, text_of_refusals


def main(*records: str) -> None:
    """Write the file from records of the matrix."""
    found = [Tried(**each) for path in records for each in json.loads(Path(path).read_text())["methods"]]
    KNOWN.write_text(text_of_refusals(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
