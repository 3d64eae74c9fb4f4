"""Executors run lowered plans and nothing else."""
