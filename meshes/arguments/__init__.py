"""Handles misspelt names, and calls with wrong arguments."""
