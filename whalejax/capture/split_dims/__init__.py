"""Splits dimensions that merge several others, such as query, key and value."""
