"""Child processes that read untrusted files, under limits.

- child: the diagnosis; verification: checks that a trace holds what was requested
- documents: decodes what they write
- confinement: the limits and the sandbox of both
"""
