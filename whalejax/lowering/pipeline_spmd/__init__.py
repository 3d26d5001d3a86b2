"""The ``pipeline_spmd`` executor: stages alike in one program."""
