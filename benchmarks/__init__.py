"""What Warpwatch costs, each figure with its limit measured or stated in the same run."""
