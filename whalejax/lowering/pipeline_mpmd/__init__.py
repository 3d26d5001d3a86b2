"""The ``pipeline_mpmd`` executor: stages with programs of their own."""
