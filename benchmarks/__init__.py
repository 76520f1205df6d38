"""Measures what Warpwatch costs; each figure stands beside its limit or a peer of the same run."""
