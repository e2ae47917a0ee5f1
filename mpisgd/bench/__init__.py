"""What `python -m mpisgd bench` measures: collectives, training steps, and both over rank counts.

Pure data comes first: `cases` (what there is to measure, and what bounds it), `summary` (statistics and
rows), `schedule` (whose turn it is). `measure` carries a plan out. Other frameworks run in processes of
their own, beside the ranks (`child`, `peers`, `gloo`, `hvd`), so that their threads and the way they end
disturb nobody.
"""
