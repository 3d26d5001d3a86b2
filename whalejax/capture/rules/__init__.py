"""Rules for the dimensions of each primitive's operands."""
