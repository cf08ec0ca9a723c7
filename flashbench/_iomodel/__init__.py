"""Bodies of flashbench.iomodel, which is the only module that others import."""
