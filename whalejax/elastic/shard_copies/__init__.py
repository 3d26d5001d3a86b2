"""Copies of shards in the memory of machines, which outlive the processes."""
