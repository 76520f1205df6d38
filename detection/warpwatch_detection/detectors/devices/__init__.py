"""Detectors of devices: readings in, results out; the register adds job and rank.

- watch: the base of them: how a symptom lasts, how a counter grows
- clocks: thermal_throttle, power_brake, overheating, clock_drop
- availability: device_lost, device_stuck, device_needs_service, device_idle
- errors: ecc_uncorrectable, row_remap, xid
- links: pcie_degraded, nvlink_error, network_link_down, network_errors
"""
