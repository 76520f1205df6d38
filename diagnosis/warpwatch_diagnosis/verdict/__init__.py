"""From findings to a verdict.

- conclusion: the Diagnosis, and how it comes about
"""
