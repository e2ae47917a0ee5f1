"""What a script imports as `horovod`; installs the import hook in a process that a script has spawned."""

from typing import Any, NoReturn

from mpisgd.horovod.shim.finder import install

__all__ = ["run"]
__version__ = "0.28.1"  # of the API

install()


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: processes are started by mpirun.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "horovod.run: mpisgd starts no processes; call the function itself in a script, and start that with "
        "mpirun -n NUM_PROC python -m mpisgd.horovod SCRIPT"
    )
