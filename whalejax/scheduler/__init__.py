"""Divides the devices of a cluster among jobs that arrive and end."""
