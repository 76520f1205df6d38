"""Reads the rendezvous, the folder that shims write to; all of their content is untrusted.

- folder: creates, owns and locks the folders of rings, commands and inboxes
- pods: finds pods with a folder of their own
- table: accepts or refuses files as rings and reads them; claims: validates their content
- source: polls all rings for records and ranks
- rank: one rank, accumulated over its processes; counts: its totals, saved over a restart
- rank_processes: what the ranks' processes use, as the kernel shows it
- inbox: collects the files of captures, and removes what nobody collects
- quotas: limits each owner's bytes, files and records
"""
