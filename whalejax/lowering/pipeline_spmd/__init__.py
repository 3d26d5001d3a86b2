"""The ``pipeline_spmd`` executor: equal stages in one program."""
