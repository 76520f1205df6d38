"""Finished captures in an object store.

- remote_store: writes to S3, GCS, Azure or a folder; uploads: retries from the local store
- remote_captures: reads a capture back
"""
