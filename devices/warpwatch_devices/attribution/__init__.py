"""Whose work runs on which device, asked beside the sampling and never by a scrape.

- source: the loops that ask each origin and publish what it said
- kubelet: which containers hold which devices; podresources_client asks the kubelet over gRPC,
  podresources_pb2 is generated from podresources.proto
- allocations: what the kubelet's answer says; device_processes: the processes on each device
- device_ids: what an id of a device plugin or a claim says; known_devices: which device that is
- control_groups: pod, container and Slurm job of a process
- pod_folders: the node's pods, by the folders that the kubelet keeps for their logs
- slurm_folder: job ids that a prolog writes to files
"""
