"""Executors for replicas with unequal shares of micro-batches."""
