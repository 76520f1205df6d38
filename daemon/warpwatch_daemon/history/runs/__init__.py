"""Keeps a summary of each run.

- run_table: sums up the runs that go on, and knows those that ended
- run_files: summaries on disk; run_uploads: and in the remote store
"""
