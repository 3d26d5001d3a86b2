"""The model as plain data: its graph, logical dimensions and repeated layers."""
