"""DCGM: what the sources ``dcgm`` and ``dcgm_exporter`` are made of.

- bindings: the seam to DCGM's own Python bindings; pause: profiling stands aside for captures
- scrape, exposition: a dcgm-exporter's text
- values, devices: in our units, of devices as NVML knows them
"""
