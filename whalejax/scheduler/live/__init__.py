"""Live jobs: the scheduler's process, its socket, and the runs that it resizes."""
