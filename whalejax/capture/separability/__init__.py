"""Proof that a loss is a mean of independent samples, or the reason why it is not.

Several micro-batches, unequal shares and pipelines compute a loss on parts of the batch
and average the results. The average is the loss of the whole batch only if the loss is
a sum over samples times a coefficient that falls as their number grows. This folder
proves that from two traces of the loss, with the samples of a part and of the whole.
"""
