"""The composition: what runs in the agent's process, and in which order it starts and stops.

- app: builds the daemon from its configuration and runs it
- sources: which sources run; capturing: what captures are made of
- pipeline: the one stream of records, to telemetry log, detectors and captures
- reloading: a changed configuration
- outgoing, telemetry_log: the exporters that have a loop of their own
"""
