"""A stranger that speaks the protocol of torch's TCPStore: it writes into whatever store it finds.

python scripts/security/stranger_store.py FOLDER NAME STARTS
"""

import multiprocessing.popen_fork  # now: another user may not be able to read it
import sys
from datetime import timedelta
from pathlib import Path

from stranger_meeting import Port, leave_root, visit
from torch.distributed import TCPStore

ANSWER = timedelta(seconds=0.5)
LIMIT_S = 1.0  # torch may wait much longer to be connected
WRITTEN = "what a stranger says"


def write(mark: Path, port: Port) -> None:
    """Set a key there that torch's NCCL group reads, and leave a file if that was done."""
    try:
        store = TCPStore(port[0], port[1], is_master=False, timeout=ANSWER, wait_for_workers=False)
        store.set("nccl_id", WRITTEN)
        if store.get("nccl_id") == WRITTEN.encode():
            mark.touch()
    except Exception:  # whatever torch raises where it is refused
        return


def attack(mark: Path, port: Port) -> bool:
    """Try to write there, in a process that can be ended (torch waits long); return whether that was done."""
    child = multiprocessing.get_context("fork").Process(target=write, args=(mark, port), daemon=True)
    child.start()
    child.join(LIMIT_S)
    child.kill()
    return mark.exists()


def main() -> None:
    """Watch and write, as often as the job starts."""
    folder, name, starts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    leave_root(name)
    visit(
        folder,
        name,
        "store",
        starts,
        lambda: None,
        lambda _, port, number: attack(folder / f"{name}-{number}-written", port),
        lambda _: None,
    )


if __name__ == "__main__":
    main()
