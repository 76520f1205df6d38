"""Where samples come from: one file a source, and the registry of them.

- base: what a source and a sink are
- nvml: NVIDIA GPUs; nvml_device, nvml_readers, nvml_fields and nvml_library are its parts
- simulated: devices without hardware; simulated_device and simulated_profiles are their physics
- host: processors, memory, pressure, disks, network
- ranks: the rendezvous with training processes, started by the application with its own needs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from warpwatch.daemon.config import SourcesConfig
from warpwatch.daemon.sources.base import Source
from warpwatch.daemon.sources.host import HostSource
from warpwatch.daemon.sources.nvml import NvmlSource
from warpwatch.daemon.sources.simulated import SimulatedSource

# How busy a device is: 0 to 1, None when nobody uses it.
LoadOf = Callable[[int], float | None]


def _host(config: SourcesConfig, load_of: LoadOf) -> Source | None:
    return HostSource(config.host) if config.host.enabled else None


def _nvml(config: SourcesConfig, load_of: LoadOf) -> Source | None:
    return NvmlSource(config.nvml) if config.nvml.enabled else None


def _simulated(config: SourcesConfig, load_of: LoadOf) -> Source | None:
    return SimulatedSource(config.simulated, load_of) if config.simulated.enabled else None


# By name; a factory answers None where the configuration does not want the source.
SOURCES: Mapping[str, Callable[[SourcesConfig, LoadOf], Source | None]] = {
    "host": _host,
    "nvml": _nvml,
    "simulated": _simulated,
}


def enabled_sources(config: SourcesConfig, load_of: LoadOf) -> list[Source]:
    """The sources that the configuration asks for."""
    sources = (build(config, load_of) for build in SOURCES.values())
    return [source for source in sources if source is not None]
