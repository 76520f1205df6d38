"""NVML of the fake driver in this process: its clock stands still unless a test moves it."""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import pynvml
import pytest

from tests.devices.fakenvml.driver import LIBRARY, FakeDriver, Value
from tests.devices.hand_loops import HandLoop, HandLoops
from tests.devices.recording import RecordingSink
from tests.manual_clock import ManualClock
from tests.waiting import eventually
from warpwatch_devices.nvml.device import DeviceContext, NvmlDevice
from warpwatch_devices.nvml.events import EventPoller
from warpwatch_devices.nvml.gpm import GpmTurns
from warpwatch_devices.nvml.library import initialise
from warpwatch_devices.xids import XidLedger
from warpwatch_telemetry.catalogue import series_text
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import DeviceSample


def uuid(gpu: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{gpu:012d}"


def texts(values: Mapping[SeriesKey, float]) -> dict[str, float]:
    return {series_text(key): value for key, value in values.items()}


class HandNvml:
    """A driver that was just loaded, and what its readers need around them."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.clock = ManualClock()
        self.loops = HandLoops(self.clock)
        self.sink = RecordingSink()
        self.ledger = XidLedger(self.clock.wall)
        # These are closed at the end, once no call hangs.
        self.closing: list[Callable[[], None]] = []
        self._calls_before: dict[int | None, dict[str, int]] = {}
        self._hanging: list[tuple[str | None, int | None, HandLoop]] = []
        self.begin()

    def begin(self, **settings: Value) -> FakeDriver:
        """Unload the driver and load it with these settings: its GPUs count from zero."""
        self.driver.clear(events=True)
        self.driver.set(None, driver_gone=1, **self._times())
        pynvml.nvmlLib = ctypes.CDLL(str(self.driver.library / LIBRARY))
        with suppress(pynvml.NVMLError):
            pynvml.nvmlDeviceGetCount()
        self.leave()
        self.driver.clear()
        self.driver.set(None, **settings, **self._times())
        self._calls_before = self.driver.calls()
        return self.driver

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.driver.set(None, **self._times())

    def rounds(self, number: int = 1, interval_s: float = 1.0) -> None:
        for _ in range(number):
            self.advance(interval_s)
            self.loops.round()

    def hang(self, loop: str, function: str | None = None, gpu: int | None = None) -> None:
        """A second later, let a function, or all on a GPU, not return, and this loop be in it.

        Until ``release`` or the test's end.
        """
        self.advance(1.0)
        self.driver.hang(function, gpu)
        before, hanging = self.calls(function, gpu), self.loops[loop]
        hanging.start()
        self._hanging.append((function, gpu, hanging))
        eventually(lambda: self.calls(function, gpu) > before)

    def release(self, function: str | None = None, gpu: int | None = None) -> None:
        """Let these calls return, and wait for the rounds that they are in."""
        self.driver.hang(function, gpu, on=False)
        for *subject, loop in self._hanging:
            if subject == [function, gpu]:
                loop.join()

    def calls(self, function: str | None = None, gpu: int | None = None) -> int:
        """How often a function, or any, was called on a GPU, or on none."""
        now, before = self.driver.calls().get(gpu, {}), self._calls_before.get(gpu, {})
        new = Counter(now)
        new.subtract(before)
        return new[function] if function else new.total()

    def close(self) -> None:
        self.driver.clear()
        self.loops.join()
        for close in self.closing:
            close()
        self.leave()

    @staticmethod
    def leave() -> None:
        with suppress(pynvml.NVMLError):
            while True:
                pynvml.nvmlShutdown()

    def _times(self) -> dict[str, float]:
        return {"monotonic_s": self.clock.monotonic(), "wall_s": self.clock.wall()}

    def samples(self, device: str) -> list[DeviceSample]:
        return self.sink.devices.get(device, [])

    def newest(self, gpu: int) -> DeviceSample:
        return self.sink.devices[uuid(gpu)][-1]

    def values(self, gpu: int) -> dict[str, float]:
        return texts(self.newest(gpu).values)

    def up(self) -> set[int]:
        return {n for n in range(16) if uuid(n) in self.sink.devices and self.newest(n).up}

    def reasons(self, *gpus: int) -> list[str]:
        return [self.newest(gpu).reason for gpu in gpus]


@contextmanager
def nvml_by_hand(driver: FakeDriver) -> Iterator[HandNvml]:
    """``driver``: the only one of this process, since the library counts calls in its file."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in driver.environment.items():
            if name.startswith("FAKENVML"):
                patch.setenv(name, value)
        patch.setenv("WARPWATCH_NVML_LIBRARY", str(driver.library / LIBRARY))
        patch.setattr(pynvml, "nvmlLib", None)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        nvml = HandNvml(driver)
        try:
            yield nvml
        finally:
            nvml.close()


INTERVAL_S = 1.0


class Stepper:
    """The only GPU of a driver."""

    def __init__(self, nvml: HandNvml) -> None:
        self.nvml = nvml
        self.device: NvmlDevice

    def begin(self, profile: str, **settings: Value) -> FakeDriver:
        """Load the driver again with these settings, for another device."""
        nvml = self.nvml
        while nvml.closing:
            nvml.closing.pop()()
        fake = nvml.begin(profile=profile, gpus=1, **settings)
        initialise()
        clocks = (nvml.clock.monotonic, nvml.clock.wall)
        events = EventPoller(nvml.loops, INTERVAL_S, 5.0, nvml.clock.monotonic)
        context = DeviceContext(nvml.sink, nvml.ledger, events, {}, GpmTurns(), *clocks)
        self.device = NvmlDevice(0, context, INTERVAL_S)
        nvml.closing += [self.device.close, events.close]
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
        return {name: s[-1] for name, s in self.nvml.sink.devices.items() if name != uuid(0)}

    @property
    def counts(self) -> dict[str, float]:
        return {" ".join(key): count for key, count in self.nvml.sink.counts.items()}
