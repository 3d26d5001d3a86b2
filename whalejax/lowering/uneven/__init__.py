"""Executors for replicas that take unlike numbers of micro-batches."""
