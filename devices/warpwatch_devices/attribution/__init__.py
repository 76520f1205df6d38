"""Finds whose work runs on which device; never during a scrape.

- source: the loops that query each origin and publish its reply
- kubelet: the containers that hold devices, over gRPC (podresources_pb2 is generated from
  podresources.proto)
- device_ids: the devices that the kubelet's ids mean
- control_groups: pod, container and Slurm job of a process
- folders: the node's pods by the folders of their logs, and job ids that a prolog writes to files
"""
