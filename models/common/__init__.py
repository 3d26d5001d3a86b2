"""Parts of several reference models: layers, batches, names, optimizers."""
