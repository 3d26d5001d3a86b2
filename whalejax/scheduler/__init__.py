"""Divides the devices of one cluster among jobs, as jobs arrive and end."""
