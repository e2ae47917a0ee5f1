"""What `python -m mpisgd bench` measures: one module for each of its commands, and for `tune`.

`cases` is pure data: what there is to measure, and what bounds it. `measure` times variants of one thing in
turns; `peers` are other frameworks, in processes of their own beside the ranks; `report` says what came out.
"""
