"""Processes of a swarm: peers serve stages, trainers send micro-batches through them.

- ``staged_job`` and ``peer_programs`` divide and compile a job.
- ``peer`` and ``peer_worker`` serve a stage.
- ``trainer``, ``micro_batch_route`` and ``commit`` run the steps.
- ``wire`` encodes tensors and states; the messages are in ``whalejax.wire``.

``whalejax.swarm`` makes the decisions.
"""
