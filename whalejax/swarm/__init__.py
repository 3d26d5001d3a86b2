"""SWARM parallelism: stages served by pools of unlike peers that may come and go.

What decides (wiring, ledger, rebalancing) takes the time as an argument and opens no
socket, so that a simulator with a virtual clock runs the code that a live run does,
which is ``whalejax.swarm_runtime``.
"""
