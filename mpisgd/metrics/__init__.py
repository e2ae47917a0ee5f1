"""`mpisgd.metrics`: step time, rate, exposed communication, waits and bytes of a running job, as numbers.

    mpisgd.metrics.start(port=9400)  # on all ranks: each host answers at http://127.0.0.1:9400/metrics
    ...
    wandb.log(mpisgd.metrics.read())  # the same as a dict

`python -m mpisgd run --metrics-port 9400` does the first without a change of the program. Each host serves
the numbers of its own ranks, which lie in the memory that `mpisgd top` looks into: nothing is sent for them,
and a host is seen also while another one hangs. Only a port needs `prometheus_client`.
"""

from mpisgd.metrics.session import read, start, stop

__all__ = ["read", "start", "stop"]
