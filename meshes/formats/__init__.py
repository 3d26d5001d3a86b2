"""Clusters as text, in files, and by the names of other systems."""
