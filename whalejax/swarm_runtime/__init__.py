"""Running swarms: peers serve stages, trainers send micro-batches through them.

``whalejax.swarm`` makes the decisions. ``staged_job`` and ``peer_programs`` compute;
``peer_worker`` and ``peer`` serve; ``trainer``, ``micro_batch_route`` and ``commit``
lead; ``wire`` encodes tensors and states. The messages are in ``whalejax.wire``.
"""
