"""Reads a Kineto/Chrome trace file into a Trace of compact events, or counts its events.

- files: the error for an unusable input, and the smaller files of a rank
- json_stream: JSON piece by piece; events, reader: the part of it that is kept
"""
