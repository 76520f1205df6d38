"""The daemon's side of the rendezvous: everything that a shim writes is untrusted input.

- folder: the daemon's own folder, and the lock by which shims know of it
- ring_folder: one folder of rings, that of all or a pod's own: rings, commands, inbox
- pods: which pods have a folder of their own; inboxes: what lies on the disk beside it;
  gone_pods: both go with their pod
- ring: reading one ring file without ever mapping it
- table: which files are accepted as rings, and which are refused and why
- source: polls all of them and gives records and ranks to the rest of the daemon
- ended: until when ranks that have ended stay, and their rings
- claims: what a ring says of itself, bounded
- runs: which run of which job a ring is of, and which rank it continues
- record_budget: how many records of it are read; quotas, usage: its owner's bytes and files
- payloads: what records hold, decoded and bounded
- rank: one rank, accumulated over the rings of its processes
- counts: what is counted of it, its newest steps, and how many names of phases it gets
- saved: positions and counts that survive a restart, in the daemon's own folder
- load: how busy the ranks keep each device, for simulated ones
- process, rank_processes: what the kernel says of a rank's process: why it gives no sign, why it
  had no core
- inbox: taking over what a process wrote for a capture
"""
