"""Recall and false alarms of the detectors on simulated inference servers.

    python -m benchmarks.judge_servers --days 50 --faults 100

Feeds servers whose iterations take 10 % or 20 % longer at equal work from some hour on, with cores
of their own, then whole days of healthy servers of all kinds (servers.py), of which one in five
shares its cores. Prints one line of JSON per part.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.servers import DAY_S, EPOCH_S, Fault, ServerModel, SimulatedServer
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.records import Record

SLOWER = (1.1, 1.2)
# A fault counts as found within HORIZON_S; the server ran for LEAD_S before.
HORIZON_S, LEAD_S = 1200.0, 7200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--days", type=float, default=50.0, help="job-days without a fault")
    parser.add_argument("--faults", type=int, default=100, help="servers of each size of fault")
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    for slower in SLOWER:
        print(json.dumps(recall(slower, given.faults, given.first_seed)), flush=True)
    print(json.dumps(false_alarms(given.days, given.first_seed)), flush=True)


def false_alarms(days: float, first_seed: int) -> dict[str, Any]:
    """Return the anomalies above info in healthy days, by kind."""
    kinds: Counter[str] = Counter()
    began, done, seed = time.process_time(), 0.0, first_seed
    while done < days:
        span = min(1.0, days - done)
        model = ServerModel.drawn(random.Random(seed), shared_cores=seed % 5 == 4)
        server = SimulatedServer(model, seed)
        found = list(_opened(server.records(span * DAY_S)))
        kinds.update(anomaly.kind for anomaly in found if anomaly.severity != "info")
        done, seed = done + span, seed + 1
    return {
        "days": done,
        "false_alarms_per_job_day": round(kinds.total() / done, 3) if done else None,
        "by_kind": dict(kinds),
        "cpu_s": round(time.process_time() - began, 1),
    }


def recall(slower: float, count: int, first_seed: int) -> dict[str, Any]:
    """Return how many servers that become slower are found, and how soon."""
    delays, early = [], 0
    for seed in range(first_seed, first_seed + count):
        draw = random.Random(f"fault {seed}")
        model, begin_s = ServerModel.drawn(draw), draw.uniform(6, 20) * 3600
        fault_s = begin_s + LEAD_S
        server = SimulatedServer(model, seed, Fault(fault_s, slower=slower))
        server.start(begin_s)
        found = list(_opened(server.records(LEAD_S + HORIZON_S)))
        times = [a.time - EPOCH_S - fault_s for a in found if a.kind == "step_regression"]
        early += sum(anomaly.time - EPOCH_S < fault_s for anomaly in found)
        delays += sorted(s for s in times if s >= 0)[:1]
    delays.sort()
    return {
        "slower": slower,
        "servers": count,
        "recall": round(len(delays) / count, 3) if count else None,
        "median_delay_s": round(delays[len(delays) // 2], 1) if delays else None,
        "p95_delay_s": round(delays[int(0.95 * len(delays))], 1) if delays else None,
        "false_alarms_before": early,
    }


def _opened(records: Iterator[Record]) -> Iterator[Anomaly]:
    engine = Detection()
    for record in records:
        for change in engine.feed(record):
            if change.what in ("opened", "reopened"):
                yield change.anomaly
    if failure := engine.pop_failure():
        raise failure


if __name__ == "__main__":
    main()
