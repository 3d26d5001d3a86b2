"""Processes that whalejax starts, watches and ends, of any kind of run."""
