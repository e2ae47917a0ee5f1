"""A stand-in for Horovod on top of gloo, as far as `mpisgd.tools.bench.peers.horovod` uses it.

Put its parent on the path.
"""

__version__ = "stand-in"
