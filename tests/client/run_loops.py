"""Runs training loops under the hooks, each in a forked child of one process that has torch.

    python -m tests.client.run_loops FOLDER NAME ...

prints what was counted, a JSON line each. The parent trains nothing, so each child is a rank.
"""

from __future__ import annotations

import json
import os
import random
import sys
from importlib import import_module

import torch

from tests.client.loop_base import LOOPS, reported

FILES = (
    "data_loops",
    "plain_loops",
    "shapes",
    "shapes_frameworks",
    "shapes_parallel",
    "shapes_unloaded",
    "training_loops",
)


def run(name: str) -> None:
    """In a forked child."""
    random.seed(0)
    torch.manual_seed(0)
    print(json.dumps({"loop": name, **reported(LOOPS[name]())}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.argv[1:], wanted = sys.argv[1:2], sys.argv[2:]
    # Imported by the first zero_grad, for seconds: once, in the parent.
    import torch._dynamo

    for file in FILES:
        import_module(f"tests.client.{file}")
    failed = 0
    for asked in wanted:
        child = os.fork()
        if child == 0:
            try:
                run(asked)
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        failed += os.waitpid(child, 0)[1]
    sys.exit(bool(failed))
