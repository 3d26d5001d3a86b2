"""Splits dimensions that consist of several."""
