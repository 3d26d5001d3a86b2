"""Executors for replicas with uneven shares of micro-batches."""
