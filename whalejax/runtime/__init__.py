"""A plan at work: the compiled step, its training loop and its checkpoints."""
