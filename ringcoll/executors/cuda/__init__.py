"""The executor of ranks on GPUs: a lowered plan becomes a kernel, compiled once per shape."""
