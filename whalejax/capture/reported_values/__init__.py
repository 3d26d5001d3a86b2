"""Rules that combine a loss's reported values over micro-batches."""
