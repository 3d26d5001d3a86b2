"""The state of a run outside devices: checkpoints, copies in memory, folder locks."""
