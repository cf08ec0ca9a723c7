"""Bodies of ``flashbench.profilers``."""
