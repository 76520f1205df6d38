"""The registry of sources: which of `devices/` the configuration asks for, and what they fill."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.state.hub import Hub
from warpwatch_devices.network import INTERVAL_S as NETWORK_INTERVAL_S
from warpwatch_devices.network import NetworkSource
from warpwatch_devices.source import Source, Surroundings


def hub_of(config: Config, node: str) -> Hub:
    """What was not read again is believed for three missed intervals, and one for a late one."""
    sources = config.sources
    # Of those that are not read every second. dcgm-exporter reads DCGM every 30 s only, and what it
    # says again is not published again.
    intervals_s = {
        "nvml": sources.nvml.interval_s,
        "host": sources.host.interval_s,
        "processes": 5.0,
        "network": NETWORK_INTERVAL_S,
        "dcgm_exporter": 30.0,
    }
    stale_after_s = {name: 4 * interval_s for name, interval_s in intervals_s.items()}
    public_url = config.http.public_url_of(node)
    return Hub(4.0, by_source=stale_after_s, hostname=node, public_url=public_url)


def enabled_sources(config: Config, surroundings: Surroundings) -> list[Source]:
    """The sources that the configuration asks for. What is off is not even imported."""
    return [*_devices(config, surroundings), *_host(config, surroundings)]


def _devices(config: Config, surroundings: Surroundings) -> Iterator[Source]:
    sources = config.sources
    if sources.nvml.enabled:
        from warpwatch_devices.kernel_log import KernelLogSource
        from warpwatch_devices.nvml.source import NvmlSource
        from warpwatch_devices.xid_ledger import XidLedger

        ledger = XidLedger()
        yield NvmlSource(sources.nvml, surroundings, ledger)
        if sources.kernel_log.enabled:
            yield KernelLogSource(ledger)
    if sources.simulated.enabled:
        from warpwatch_devices.simulated.source import SimulatedSource

        yield SimulatedSource(sources.simulated, surroundings.load_of)
    if sources.dcgm.enabled:
        from warpwatch_devices.dcgm.source import DcgmSource

        yield DcgmSource(sources.dcgm, surroundings)
    if sources.dcgm_exporter.url is not None:
        from warpwatch_devices.dcgm.exporter_source import DcgmExporterSource

        yield DcgmExporterSource(sources.dcgm_exporter, surroundings)


def _host(config: Config, surroundings: Surroundings) -> Iterator[Source]:
    sources = config.sources
    if sources.host.enabled:
        from warpwatch_devices.host import HostSource

        yield HostSource(sources.host)
        if not sources.simulated.enabled:
            yield NetworkSource(surroundings)
    if sources.processes.enabled:
        from warpwatch_devices.processes import ProcessesSource

        yield ProcessesSource(surroundings)
    attribution = config.attribution
    if {attribution.kubelet_socket, attribution.slurm, attribution.pod_logs} != {"off"}:
        from warpwatch_devices.attribution.source import AttributionSource

        yield AttributionSource(attribution, surroundings)
