"""Plans as numpy on one thread a rank, over memory that the ranks of a host share."""
