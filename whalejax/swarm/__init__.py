"""SWARM parallelism: stages served by pools of different peers that may join and leave.

The code of its decisions takes the time as an argument and opens no socket. So a
simulator with a virtual clock runs the same code as a live run, which is in
``whalejax.swarm_runtime``.
"""
