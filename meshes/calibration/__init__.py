"""Measures devices and links, and stores the results."""
