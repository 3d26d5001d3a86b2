"""A plan at work: the compiled step, its state and its checkpoints."""
