"""The rows of *Training job* that compare its ranks."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links
from warpwatch_dashboards.job_queries import (
    BUSY_OF_RANKS,
    BY_JOB,
    GPU_BUSY,
    MEMORY,
    MEMORY_OF_RANKS,
    in_order,
    lateness,
    own_s,
    ranks_by_device,
)
from warpwatch_dashboards.page import Row
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, at_least, at_most, graph, heat_map
from warpwatch_dashboards.queries import (
    JOB,
    PLACE,
    RANK_KEY,
    RANK_LEGEND,
    WINDOW,
    Query,
    grown,
    series,
    total,
    workloads,
)
from warpwatch_dashboards.tables import Column, table


def _where_ranks_run() -> models.Panel:
    key = f"{RANK_KEY}, host, local_rank, device, framework, step_clock"
    holders = workloads('namespace!=""')
    # If several share a GPU, it is unknown which is the rank's.
    pods = f"({holders} and on ({PLACE}, uuid) count by ({PLACE}, uuid) ({holders}) == 1)"
    owners = f"{ranks_by_device()} * on ({PLACE}, uuid) group_left (namespace, pod) {pods}"
    return table(
        "Where ranks run",
        "Each rank's node, GPU and pod (not where several pods share the GPU), the versions it "
        "runs on, and what ends a step of it (step_clock). Versions that differ between ranks are "
        "a fault of the image.",
        [
            Column(f"max by ({key}) ({series('rank_info', JOB)})"),
            Column(f"max by ({RANK_KEY}, namespace, pod) ({owners})"),
            Column(f"max by ({RANK_KEY}) ({series('rank_up', JOB)})", "Up", "none", at_least(1)),
        ],
        width=24,
        links=[links.node_of_row()],
    )


_NEWEST = f"max by ({BY_JOB}) ({series('rank_step', JOB)})"
_STEP = f"max by ({RANK_KEY}) ({series('rank_step', JOB)})"
_ENDED = f"max by ({RANK_KEY}) ({series('rank_last_step_timestamp_seconds', JOB)})"
_RANKS_ROW = Row(
    "Ranks",
    [
        heat_map(
            "Own time by rank",
            "Mean step time without the wait for others, checkpoints and evaluation. One line "
            "that is warmer than the rest is the straggler: look at its node's clocks, "
            "temperature and PCIe.",
            Query(in_order(own_s()), RANK_LEGEND),
            unit="s",
            width=12,
        ),
        graph(
            "Stragglers",
            "The ten latest ranks: own time over the median of the job's ranks, from all nodes, "
            "less 1. One that stays above 10 % holds all others up.",
            Query(f"topk(10, {lateness()})", RANK_LEGEND),
            unit="percentunit",
            limits=at_most(0.1, 0.25),
            links=[links.node_of_series()],
            width=12,
        ),
        graph(
            "Since the last step",
            "Time since each rank finished a step, the ten longest, up to the step time and the "
            "interval of the scrapes while all is well. A line that climbs is a hang.",
            Query(f"topk(10, time() - {_ENDED})", RANK_LEGEND),
            unit="s",
        ),
        graph(
            "Steps behind",
            "How many steps each rank is behind the first, the ten farthest. Nodes are scraped one "
            "after the other, so some steps mean nothing; a line that climbs stands still.",
            Query(f"topk(10, {_NEWEST} - on ({BY_JOB}) group_right () {_STEP})", RANK_LEGEND),
        ),
        graph(
            "GPU busy by rank",
            "Share of time in which a kernel ran on the rank's GPU, the ten least busy. One low "
            "line: that rank's host or data; all low: the job waits.",
            Query(f"bottomk(10, {BUSY_OF_RANKS})", RANK_LEGEND),
            unit="percentunit",
            maximum=1,
            limits=at_least(GPU_BUSY),
            links=[links.node_of_series()],
        ),
        _where_ranks_run(),
    ],
)


_ALLOCATED = series("rank_memory_allocated_bytes", JOB)
_RESERVED = series("rank_memory_reserved_bytes", JOB)
_SPLIT = series("rank_memory_inactive_split_bytes", JOB)
_RETRIES = total(RANK_KEY, grown(series("rank_allocation_retries_total", JOB), WINDOW))
_OUT_OF_MEMORY = total(RANK_KEY, grown(series("rank_out_of_memory_errors_total", JOB), WINDOW))
_MEMORY_ROW = Row(
    "Memory",
    [
        graph(
            "GPU memory by rank",
            "Memory in use on a rank's GPU by what it has, the ten fullest. Aim below 90 %. Ranks "
            "that differ have uneven work.",
            Query(f"topk(10, {MEMORY_OF_RANKS})", RANK_LEGEND),
            unit="percentunit",
            maximum=1,
            limits=at_most(MEMORY),
        ),
        graph(
            "Allocated by rank",
            "What tensors take of the GPU's memory, the ten ranks with the most. It saws with the "
            "steps; a floor that climbs from step to step is a leak.",
            Query(f"topk(10, {_ALLOCATED})", RANK_LEGEND),
            unit="bytes",
        ),
        graph(
            "Reserved by rank",
            "What the allocator holds, the ten ranks with the most. Far above what is allocated: "
            "a cache that others cannot use.",
            Query(f"topk(10, {_RESERVED})", RANK_LEGEND),
            unit="bytes",
        ),
        graph(
            "Fragmentation by rank",
            "Free pieces of blocks that are partly in use, as a share of what is reserved, the "
            "ten highest. A rise ends in allocations that fail though memory is free.",
            Query(f"topk(10, {_SPLIT} / {_RESERVED})", RANK_LEGEND),
            unit="percentunit",
        ),
        graph(
            "Allocation retries",
            "Allocations that failed first and were tried again after the cache was given back. "
            f"Each costs milliseconds; the next step is out of memory. {EMPTY_WHEN_HEALTHY}",
            Query(_RETRIES, RANK_LEGEND),
            width=12,
        ),
        graph(
            "Out of memory",
            f"Out-of-memory errors of the rank's allocator. {EMPTY_WHEN_HEALTHY}",
            Query(_OUT_OF_MEMORY, RANK_LEGEND),
            width=12,
        ),
    ],
    width=6,
)


RANK_ROWS = [_RANKS_ROW, _MEMORY_ROW]
