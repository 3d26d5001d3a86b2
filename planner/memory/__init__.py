"""The peak memory of a step: what is held, and when."""
