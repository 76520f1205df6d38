"""DCGM: the sources ``dcgm`` (source) and ``dcgm_exporter`` (exporter_source).

- bindings: the seam to DCGM's own Python bindings; pause: profiling stands aside for captures
- scrape: a dcgm-exporter's page
- values, devices: in our units, of devices as NVML knows them
"""
