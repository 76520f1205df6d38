"""Composes the agent's process, and starts and stops its parts in order.

- app: builds the daemon from its configuration and runs it; composition: builds its parts
- pipeline: the one stream of records, to telemetry log, detectors and captures
"""
