"""Reads DCGM: the sources ``dcgm`` (source) and ``dcgm_exporter`` (exporter_source).

- bindings: wraps DCGM's own Python bindings
- values: converts values to our units and finds their devices among those of NVML
"""
