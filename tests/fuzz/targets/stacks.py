"""Stacks files, up to who waits for whom."""

import json
from pathlib import Path

from tests.diagnosis.stacks.test_stacks import REDUCE, place, stack
from tests.fuzz.watch import Target, json_tokens
from warpwatch_diagnosis.stacks import diagnose_stacks
from warpwatch_diagnosis.trace.files import TraceError


def target(folder: Path) -> Target:
    fuzzed, other = folder / "rank0.stacks.json", stack(folder, 1, REDUCE)

    def run(data: bytes) -> None:
        fuzzed.write_bytes(data)
        try:
            found = diagnose_stacks([fuzzed, other], {0: "stopped: x"})
        except TraceError as error:
            assert "\n" not in str(error)
        else:
            json.dumps(found, allow_nan=False)

    recorded = {"sequence": 3, "name": "nccl:all_reduce", "process_group": "0", "state": "started"}
    lock = ("/home/me/train.py", 9, "main")
    seeds = [
        stack(folder, 0, None).read_bytes(),
        stack(folder, 0, REDUCE).read_bytes(),
        place(
            folder, 0, lock, calls="acquire", collectives=[recorded | {"time": 1.0}]
        ).read_bytes(),
        place(folder, 0, lock, silent_reason="holds the GIL").read_bytes(),
    ]
    words = b'"threads": "frames": "collectives": "time": "silent_reason":"stopped" true "rank":'
    return Target(run, seeds, json_tokens(words))
