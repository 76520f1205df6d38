"""Reads the rendezvous, the folder that shims write to; all of their content is untrusted.

- folder: creates, owns and locks the folders of rings, commands and inboxes
- pods: finds pods with a folder of their own; inboxes: their inboxes, and removal with the pod
- table: accepts or refuses files as rings and reads them; claims: validates their content
- source: polls all rings for records and ranks
- rank: one rank, accumulated over its processes; counts: its totals, saved over a restart
- record_budget: limits the records read; quotas: limits each owner's bytes and files
- process, rank_processes: a rank's process as the kernel shows it
- load: estimates how busy the ranks keep each device, for simulated ones
- inbox: collects the files of captures
"""
