"""Finds the dimensions that each part of a model may shard, and the layouts."""
