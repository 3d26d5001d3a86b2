"""Proof that a loss is a mean of independent samples, or what couples them.

Several micro-batches, unequal shares and pipelines compute a loss on parts of the batch
and average the results. That is the loss of the whole batch only where it is a sum over
samples with a coefficient that falls as their number grows. This folder proves that
from two traces of the loss, with the samples of a part and with those of the whole.

    values      what a value is known to be: fixed, per sample, a sum, or coupled
    alignment   how dimensions of operands lie beside each other
    rules       by primitive, in several modules
    interpret   goes through both traces, and into loops, branches and calls
    proof       the verdict, and the text for what is not proven
"""
