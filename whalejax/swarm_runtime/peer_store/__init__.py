"""State, tensors and gradient sums of a peer."""
