"""`python -m mpisgd.horovod script.py`: makes the modules of a Horovod installation appear.

finder   which module of ours appears under which name
path/    those that have no other use here; also how processes that a script spawns come to the finder
program  runs the script as plain Python would
"""
