"""Leads a run beside the trainer of its registry."""
