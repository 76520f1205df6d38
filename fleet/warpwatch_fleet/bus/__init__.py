"""Several fleet processes, the workers, share the jobs over a bus: NATS with JetStream.

- streams: the definition of stream and buckets
- partition: one partition: its messages in, committed changes of anomalies out
- sharing: the division of the partitions among the workers
- worker: the partitions that this process has
- fleet: the views of all workers together
"""
