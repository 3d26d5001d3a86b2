"""Reduction of gradients over an elastic run's processes: backends and their choice."""
