"""Functions that users call: ``plan``, ``search``, feeds and volumes; jobs by name."""
