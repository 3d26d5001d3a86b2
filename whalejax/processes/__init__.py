"""Processes that whalejax starts, watches and ends, for any kind of run."""
