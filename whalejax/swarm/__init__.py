"""Pipelines over unreliable peers: each stage is served by a set of processes."""
