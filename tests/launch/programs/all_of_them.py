"""Every program of this folder, one after the other in one job: python all_of_them.py BACKEND NAME ..."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    backend, *names = sys.argv[1:]
    for name in names:
        sys.argv = [name, backend]
        runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
