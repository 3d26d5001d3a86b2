"""Journals that runs write, and their readers."""
