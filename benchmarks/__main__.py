"""``make bench``: every benchmark, one JSON object on standard output.

``make bench ARGS=shim`` runs one of them.
"""

from __future__ import annotations

import json
import sys

from benchmarks import agent, capture, shim_step

BENCHMARKS = {"shim": shim_step.measure, "agent": agent.measure, "capture": capture.measure}


def main() -> int:
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        print(f"no benchmark {sorted(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    results = {}
    for name in names:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        results[name] = BENCHMARKS[name]()
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
