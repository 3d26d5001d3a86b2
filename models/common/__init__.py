"""Parts that several reference models share: layers, batches, names, optimizers."""
