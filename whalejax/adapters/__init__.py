"""One interface for NNX modules, Linen variables and plain pytrees."""
