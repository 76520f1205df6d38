"""Several fleet processes, the workers, share the jobs over a bus: NATS with JetStream.

- states: the state of jobs in a bucket, with one head for each partition
- partition: one partition: its messages in, committed changes of anomalies out
- partitions: the partitions of this worker as one cluster
- sharing: the division of the partitions among the workers
- links: the agents, by requests
- streams: the definition of stream and buckets
- worker: the partitions that this process has
- peers: the views of the other workers; fleet: all views together
"""
