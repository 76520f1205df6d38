"""Detectors of inference servers; kinds that trainings have, too, read servers in their own files.

- stalls: the part of hang for servers: requests in flight and no progress
- overload: kv_thrash and queue_growth, the engine's cache and queue
- latency_regression: latencies that the iterations do not explain, with the cause
"""
