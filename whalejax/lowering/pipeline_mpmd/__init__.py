"""The ``pipeline_mpmd`` executor: one program for each stage."""
