"""A stranger that speaks the protocol of torch's TCPStore: it writes into whatever store it finds.

python scripts/stranger_store.py FOLDER NAME STARTS
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from stranger_meeting import Port, leave_root, visit
from torch.distributed import TCPStore

ANSWER = timedelta(seconds=0.5)
WRITTEN = "what a stranger says"


def write(_: None, port: Port, __: str) -> bool:
    """Set a key there that torch's NCCL group reads; whether that was done."""
    try:
        store = TCPStore(port[0], port[1], is_master=False, timeout=ANSWER, wait_for_workers=False)
        store.set("nccl_id", WRITTEN)
        return store.get("nccl_id") == WRITTEN.encode()
    except Exception:  # whatever torch raises where it is refused
        return False


def main() -> None:
    """Watch and write, as often as the job starts."""
    folder, name, starts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    leave_root(name)
    visit(folder, name, "store", starts, lambda: None, write, lambda _: None)


if __name__ == "__main__":
    main()
