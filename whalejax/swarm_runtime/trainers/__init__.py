"""Secondary trainers, which lead micro-batches of a run."""
