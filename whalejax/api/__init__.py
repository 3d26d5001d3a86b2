"""Functions that users call: ``plan``, ``search``, feeds, volumes, jobs by name."""
