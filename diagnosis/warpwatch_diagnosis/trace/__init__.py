"""A Kineto/Chrome trace file becomes a Trace of compact events.

- files: the error for an unusable input, and the smaller files of a rank
- json_stream: JSON piece by piece; events, reader: the part of it that is kept
- inventory: what is in a file, counted without keeping it
"""
