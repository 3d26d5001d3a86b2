"""NNX, Linen and plain pytrees, brought to one shape."""
