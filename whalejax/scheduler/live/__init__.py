"""The scheduler of live jobs: its process, its socket, and the runs that it resizes."""
