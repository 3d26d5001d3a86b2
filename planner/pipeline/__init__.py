"""Pipelines: schedules, where stages are cut, and where they lie."""
