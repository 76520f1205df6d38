"""The rows of *Node and GPUs* about what devices do: use, memory, power, clocks."""

from __future__ import annotations

from warpwatch_dashboards.by_device import as_it_is, by_device, per_second, share
from warpwatch_dashboards.page import Row
from warpwatch_dashboards.panels import at_least, at_most, graph
from warpwatch_dashboards.queries import DEVICE, Query, rate, series, total

_BUSY = rate(series("device_busy_seconds_total", DEVICE))
_USE_ROW = Row(
    "Use",
    [
        graph(
            "GPU busy",
            "Share of time in which at least one kernel ran, from a counter that misses nothing "
            "between scrapes. Below 80 % the GPU waits. Not known of MIG instances.",
            by_device(_BUSY, ""),
            unit="percentunit",
            maximum=1,
            limits=at_least(0.8),
        ),
        share(
            "SMs active",
            "Share of SMs that were busy, on average. Far below GPU busy: kernels too small to "
            "fill the GPU.",
            "device_sm_active_ratio",
        ),
        share(
            "Tensor cores active",
            "Share of cycles in which tensor cores worked. Low in a training with high GPU busy: "
            "wrong precision, small matrices, memory-bound kernels.",
            "device_tensor_active_ratio",
        ),
        share(
            "Device memory active",
            "Share of cycles in which device memory moved data. Near 80 %: memory-bound.",
            "device_dram_active_ratio",
        ),
        share(
            "Occupancy",
            "Resident warps as a share of the most. Low is not bad in itself: large matrix "
            "kernels need few.",
            "device_sm_occupancy_ratio",
        ),
        share(
            "Graphics engine active",
            "Share of time in which the graphics or compute engine was active: GPU busy as the "
            "counters see it, also of MIG instances.",
            "device_graphics_active_ratio",
        ),
        share(
            "Tensor cores by type",
            "Which numbers tensor cores work on: hmma half precision, imma integers, dfma doubles.",
            "device_tensor_type_active_ratio",
            "type",
            width=12,
        ),
        share(
            "Pipes",
            "Share of cycles in which each pipe of the SMs was active.",
            "device_pipe_active_ratio",
            "pipe",
            width=12,
        ),
    ],
)


_USED = series("device_memory_used_bytes", DEVICE)
_WHOLE = series("device_memory_total_bytes", DEVICE)
_MEMORY_ROW = Row(
    "Memory",
    [
        graph(
            "Memory in use",
            "Memory in use by what the device has. Aim below 90 %.",
            by_device(f"{_USED} / {_WHOLE}", ""),
            unit="percentunit",
            maximum=1,
            limits=at_most(0.9),
            width=8,
        ),
        as_it_is(
            "Memory used",
            "Bytes in use, without what the driver reserves.",
            "device_memory_used_bytes",
            unit="bytes",
            width=8,
        ),
        share(
            "Memory controller",
            "Share of time in which memory was read or written. It says that, not how much.",
            "device_memory_utilization_ratio",
            width=8,
        ),
    ],
)


_POWER = series("device_power_watts", DEVICE)
_LIMIT = series("device_power_limit_watts", DEVICE)
_POWER_ROW = Row(
    "Power and temperature",
    [
        per_second(
            "Power",
            "What each device draws, from its energy counter: a watt is a joule a second.",
            "device_energy_joules_total",
            unit="watt",
        ),
        graph(
            "Power by its limit",
            "Draw as a share of the limit in force. At 100 % the device lowers its clocks: "
            "normal under full load, unless the limit is below the default.",
            by_device(f"{_POWER} / {_LIMIT}", ""),
            unit="percentunit",
        ),
        as_it_is(
            "Power limit",
            "The limit in force. One GPU below its peers is a straggler in waiting.",
            "device_power_limit_watts",
            unit="watt",
        ),
        as_it_is(
            "Temperature",
            "Of the GPU and its memory. Compare with peers: one that is 10 °C warmer has a "
            "cooling fault.",
            "device_temperature_celsius",
            "sensor",
            unit="celsius",
        ),
        as_it_is(
            "Margin to slowdown",
            "How much warmer the device may get before it slows down. 0: it does.",
            "device_temperature_margin_celsius",
            unit="celsius",
            limits=[(None, "red"), (2, "orange"), (5, "green")],
        ),
        share(
            "Fans",
            "Speed that each fan is set to; devices cooled by the chassis have none.",
            "device_fan_speed_ratio",
            "fan",
        ),
    ],
)


_CLOCK = series("device_clock_hertz", DEVICE, 'domain="sm"')
_HIGHEST = series("device_clock_max_hertz", DEVICE)
_CLOCKS_ROW = Row(
    "Clocks and throttling",
    [
        as_it_is(
            "Clocks",
            "Clock of each domain. Under load the SM clock of equal GPUs is equal.",
            "device_clock_hertz",
            "domain",
            unit="hertz",
        ),
        graph(
            "SM clock by its highest",
            "Low while idle is normal; low while busy is throttling: see the reasons.",
            by_device(f"{_CLOCK} / {_HIGHEST}", ""),
            unit="percentunit",
            maximum=1,
        ),
        per_second(
            "Throttled by reason",
            "Share of time for which a reason held clocks down. sw_power_cap under full load is "
            "normal; thermal and power brake are faults of cooling and power.",
            "device_throttle_seconds_total",
            "reason",
            unit="percentunit",
        ),
        graph(
            "Throttled now",
            "How many devices each reason holds down at this moment; idle is no fault.",
            Query(total("reason", series("device_throttle_active", DEVICE)), "{{reason}}"),
            width=12,
        ),
        as_it_is(
            "Performance state",
            "P-state: 0 is the fastest, 15 the slowest. Busy and not 0: look at the clocks.",
            "device_performance_state",
            width=12,
        ),
    ],
)


DEVICE_ROWS = [_USE_ROW, _MEMORY_ROW, _POWER_ROW, _CLOCKS_ROW]
