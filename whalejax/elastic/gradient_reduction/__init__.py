"""Reduction of gradients over an elastic run's processes, chosen by cost."""
