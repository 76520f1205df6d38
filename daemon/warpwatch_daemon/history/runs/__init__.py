"""What is kept of each run, and how two of them differ.

- run_table: sums up the runs that go on, and knows those that ended
- run_figures: the figures of one run, as its steps come
- run_files: summaries on disk; run_uploads: and in the remote store
- comparison: two summaries side by side, and which ones a run is compared with
"""
