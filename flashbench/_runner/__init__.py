"""Parts of the runner: a cell's way to its call, what went wrong in words, times that cannot be."""
