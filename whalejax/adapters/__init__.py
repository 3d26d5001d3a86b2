"""NNX, Linen and plain pytrees behind one interface."""
