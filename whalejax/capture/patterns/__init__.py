"""Patterns in traced programs: attention, softmax and large logits."""
