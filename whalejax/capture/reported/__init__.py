"""How values that a loss reports are combined over micro-batches."""
