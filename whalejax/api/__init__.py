"""What users call: annotations, ``plan``, ``search``, losses and feeds."""
