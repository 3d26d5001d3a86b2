"""The search over many layouts at once, as arrays."""
