"""Processes that whalejax starts, monitors and ends, for any kind of run."""
