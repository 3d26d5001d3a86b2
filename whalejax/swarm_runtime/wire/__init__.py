"""Messages of a swarm, and tensors between peers."""
