"""Pipelines: schedules, cuts into stages, and the stages' devices."""
