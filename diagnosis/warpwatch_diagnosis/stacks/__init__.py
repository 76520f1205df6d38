"""Where the ranks of a hanging job stand: rank by rank, and who waits for whom."""
