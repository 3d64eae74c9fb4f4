"""Ways to begin."""
