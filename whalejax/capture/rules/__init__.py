"""How each primitive treats the dimensions of its operands."""
