"""Questions and answers of a swarm, and tensors between them."""
