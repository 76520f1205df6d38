"""Turns findings into a verdict.

- conclusion: the Diagnosis; findings: one per fault, in order; doubts: reasons against a verdict
- likeliest: the cause that is named if no rule is sure
"""
