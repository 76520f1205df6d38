"""``make bench``: runs every benchmark and prints one JSON object.

``make bench ARGS=merge`` runs one of them; ``--quick`` shortens those that can be shortened. If one
cannot be measured, the exit status is 1 and one line gives the reason. ``benchmarks.judge``, which
measures the detectors, is a command of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

from benchmarks.processes import CannotMeasure
from warpwatch_telemetry.errors import WarpwatchError

BENCHMARKS = {
    "programs": "programs.measure",
    "agent": "agent.measure",
    "devices": "devices.measure",
    "capture": "capture.measure",
    "pause": "capture.measure_pause",
    "detectors": "detectors.measure",
    "diagnosis": "diagnosis.measure",
    "fleet": "fleet.measure",
    "bus": "fleet_bus.measure",
    "large": "fleet_bus.measure_large",
    "merge": "diagnosis.measure_merge",
    "serve": "serve.measure",
}


def main() -> int:
    names = [name for name in sys.argv[1:] if name != "--quick"] or list(BENCHMARKS)
    if "--quick" in sys.argv:
        os.environ["WARPWATCH_BENCH_QUICK"] = "1"
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        print(f"no benchmark {sorted(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    # An exception, so that the started processes are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: dict[str, object] = {}
    for name in names:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        try:
            module, function = BENCHMARKS[name].split(".")
            results[name] = getattr(importlib.import_module(f"benchmarks.{module}"), function)()
        except (CannotMeasure, ImportError, TimeoutError, WarpwatchError) as error:
            print(f"{name}: {error}", file=sys.stderr)
    print(json.dumps(results, indent=1, ensure_ascii=False))
    return int(len(results) < len(names))


if __name__ == "__main__":
    sys.exit(main())
