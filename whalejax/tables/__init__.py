"""Embedding tables on devices: found in a loss, looked up and updated there."""
