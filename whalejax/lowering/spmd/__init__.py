"""The ``spmd`` executor: one program on all devices."""
