"""From findings to a verdict.

- conclusion: the Diagnosis, and how it comes about; findings: in their order; doubts: what speaks
  against a verdict; likeliest: what is said nevertheless
"""
