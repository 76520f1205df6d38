"""Steps one device of the nvml source under the fake driver, round by round."""

from __future__ import annotations

from tests.devices.fakenvml.driver import FakeDriver, Value
from tests.devices.nvml_by_hand import HandNvml, texts, uuid
from warpwatch_devices.nvml.device import Companions, NvmlDevice
from warpwatch_devices.nvml.events import EventWatcher
from warpwatch_devices.nvml.gpm import GpmWorker
from warpwatch_devices.nvml.library import initialise
from warpwatch_telemetry.samples import DeviceSample

INTERVAL_S = 1.0


class Stepper:
    """The only GPU of a driver."""

    def __init__(self, nvml: HandNvml) -> None:
        self.nvml = nvml
        self.device: NvmlDevice

    def begin(self, profile: str, **settings: Value) -> FakeDriver:
        """Load the driver again with these settings, for another device."""
        nvml = self.nvml
        fake = nvml.begin(profile=profile, gpus=1, **settings)
        initialise()
        monotonic, sink = nvml.clock.monotonic, nvml.sink
        gpm = GpmWorker(nvml.loops, INTERVAL_S, 5.0, monotonic)
        events = EventWatcher(nvml.loops, sink, nvml.ledger, monotonic)
        nvml.closing += [gpm.close, events.close]
        clocks = (monotonic, nvml.clock.wall)
        companions = Companions(sink, nvml.ledger, events, gpm, *clocks)
        self.device = NvmlDevice(0, companions, INTERVAL_S)
        return fake

    def step(self, rounds: int = 1) -> dict[str, float]:
        """The values of the GPU after so many rounds more, a second apart."""
        for _ in range(rounds):
            self.nvml.advance(INTERVAL_S)
            self.device.step()
        self.device.costs.drain(self.nvml.sink.count)
        return texts(self.gpu.values)

    def calls(self, function: str | None = None) -> int:
        return self.nvml.calls(function, 0)

    @property
    def gpu(self) -> DeviceSample:
        return self.nvml.newest(0)

    @property
    def instances(self) -> dict[str, DeviceSample]:
        """The MIG devices by their UUID."""
        return {name: s[-1] for name, s in self.nvml.sink.devices.items() if name != uuid(0)}

    @property
    def counts(self) -> dict[str, float]:
        return {" ".join(key): count for key, count in self.nvml.sink.counts.items()}
