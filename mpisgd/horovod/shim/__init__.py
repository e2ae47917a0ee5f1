"""`python -m mpisgd.horovod script.py`: an import shim, by which `horovod` names modules of mpisgd.horovod.

finder   an import hook that maps Horovod's module names to ours
path/    modules that only scripts for Horovod import; also how processes that a script spawns get the hook
program  runs the script as plain Python would
"""
