"""Rewrites of traced programs: mixed precision and rematerialisation."""
