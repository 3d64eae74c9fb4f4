"""Models that the benchmark of training trains: each with its data and its optimizer."""
