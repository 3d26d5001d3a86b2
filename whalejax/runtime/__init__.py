"""Execution of a plan: the compiled step, its training loop and its profile."""
