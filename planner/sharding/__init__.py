"""What each part of a model may shard, and the layouts that follow."""
