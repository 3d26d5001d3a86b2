"""Journals that runs write as they go, and their readers."""
