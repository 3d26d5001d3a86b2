"""Dimensions made of several, taken apart."""
