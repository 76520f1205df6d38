"""A Kineto/Chrome trace file becomes a Trace of compact events.

- errors: the one error; kinds: what the profiler calls the events and arguments that are read
- json_stream, raw_events: JSON piece by piece; events, reader: what of it is kept
- inventory: what is in a file, counted without keeping it
"""
