"""Swarms that run: peers serve stages, trainers send micro-batches through them.

What they decide, ``whalejax.swarm`` decides for them. ``cut`` and ``stage`` compute,
``worker`` and ``peer`` serve, ``trainer``, ``passage`` and ``commit`` lead, ``wire``
carries.
"""
