"""Profiles of steps, compared with the plan's predictions."""
