"""Facts that the processes of a run must share, and their comparison."""
