"""Measuring devices and links, and what is kept of it."""
