"""The hooks of vLLM and SGLang on stand-ins, which have the names that they use.

As in vLLM 0.32 and SGLang 0.5.23.
"""

import os
from typing import Any

import pytest

from tests.cases import cases
from tests.client.daemon_side import program
from tests.client.fork_server import ROOT

BOOTSTRAP = ROOT / "client/warpwatch/bootstrap"
SERVERS = ROOT / "tests/client/servers"
TABLE = cases(__file__)
CASES = TABLE["cases"]
ENDS = """
print("served", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_process_of_a_server_reports(folder, case):
    path = os.pathsep.join((str(BOOTSTRAP), str(SERVERS)))
    environ = {**case.get("environ", {}), "PYTHONPATH": path}
    code = "\n".join([*case["program"], TABLE["waits"], ENDS])
    with program(folder, code, *case.get("arguments", ()), **environ) as process:
        printed = [process.stdout.readline() for _ in range(case.get("lines", 0) + 1)]
        assert printed[-1] == "served\n", process.stderr.read()
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
    ring = folder.ring()
    said = ring.metadata
    latencies = {(kind, bucket): 0 for kind, bucket, _ in ring.latencies}
    for kind, bucket, number in ring.latencies:
        latencies[kind, bucket] += number
    found: dict[str, Any] = {
        "metadata": {name: said.get(name) for name in case.get("metadata", ())},
        "replica": str(said.get("run"))[-4:],
        "works": [list(work) for work in ring.works],
        "phases": sorted(said["phases"]),
        "counts": [sum(second[place] for second in ring.seconds) for place in range(5, 10)],
        "running": list(ring.seconds[-1][2:4]),
        "kv_usage": ring.seconds[-1][4],
        "latencies": [[*entry, number] for entry, number in sorted(latencies.items())],
        "events": ring.event_names(),
        "ended": ring.header.ended,
    }
    expected = {name: case[name] for name in found if name in case}
    assert {name: found[name] for name in expected} == expected


def test_the_entry_points_are_found_only_in_the_folder_of_run():
    names = (BOOTSTRAP / "warpwatch_hooks-0.dist-info/entry_points.txt").read_text()
    assert "warpwatch = warpwatch.hooks.vllm:install" in names
