"""Encoding of tensors and states that processes of a swarm exchange."""
