"""A run's state outside devices: checkpoints, copies in memory, locks of folders."""
