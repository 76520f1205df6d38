"""Which series of a device come out: about 30, 90, or all that the driver tells."""

from __future__ import annotations

import functools
from typing import Literal

from warpwatch_telemetry.catalogue import CATALOGUE

Profile = Literal["minimal", "default", "full"]

# What somebody owns, does, and what must be repaired.
_MINIMAL = """
    up info workload_info slurm_job_info sample_timestamp_seconds utilization_ratio
    memory_utilization_ratio busy_seconds_total sm_active_ratio tensor_active_ratio
    memory_used_bytes memory_total_bytes power_watts energy_joules_total temperature_celsius
    throttle_seconds_total pcie_replay_total nvlink_links nvlink_links_up
    nvlink_receive_bytes_total nvlink_transmit_bytes_total ecc_errors_total remapped_rows
    row_remap_pending row_remap_failure xid_errors_total
"""
# Settings, parts whose sum is told, and rates that counters give.
_FULL_ONLY = """
    nvlink_link_up nvlink_receive_bytes_per_second nvlink_transmit_bytes_per_second
    pcie_receive_bytes_per_second pcie_transmit_bytes_per_second pcie_errors_total
    ecc_location_errors_total row_remap_banks
    violation_seconds_total temperature_margin_threshold_celsius power_instant_watts
    power_limit_default_watts power_limit_min_watts power_limit_max_watts
    bar1_memory_used_bytes bar1_memory_free_bytes bar1_memory_total_bytes
    encoder_utilization_ratio decoder_utilization_ratio jpeg_utilization_ratio
    ofa_utilization_ratio compute_mode persistence_mode vgpu_licensed
"""
MINIMAL = frozenset(f"device_{name}" for name in _MINIMAL.split())
FULL_ONLY = frozenset(f"device_{name}" for name in _FULL_ONLY.split())


@functools.cache
def names_of(profile: Profile) -> tuple[str, ...]:
    """The metrics of a profile, in the catalogue's order; only devices have fewer."""
    return tuple(name for name, row in CATALOGUE.items() if _is_in(profile, name, row.scope))


def _is_in(profile: Profile, name: str, scope: str) -> bool:
    if profile == "minimal" and scope == "device":
        return name in MINIMAL
    return profile == "full" or name not in FULL_ONLY
