"""``python -m tests.fuzz.child``: one target in a process of its own, which may die of it."""

import importlib
import json
import logging
import os
import random
import sys
from pathlib import Path

from tests.fuzz import engines
from tests.fuzz.watch import Findings, Target, Watch

RESULT = "result.json"


def load(name: str, work: Path) -> Target:
    """Refusals are logged, and millions of them are not news."""
    logging.disable(logging.CRITICAL)
    target: Target = importlib.import_module(f"tests.fuzz.targets.{name}").target(work)
    return target


def main(name: str, work: Path, folder: Path, limits: list[str]) -> None:
    """``limits``: inputs, seconds, and the seed of mutations that are not to be guided."""
    inputs, seconds, seeds = int(limits[0]), float(limits[1]), [int(one) for one in limits[2:]]
    is_guided = not seeds and engines.has_atheris()
    target = engines.instrumented(lambda: load(name, work)) if is_guided else load(name, work)
    watch = Watch(target, work, Findings(folder / "findings", name), inputs, seconds)

    def run(data: bytes) -> None:
        watch(data)
        if watch.share() >= 1:
            engine = {"engine": "atheris" if is_guided else "mutation"}
            (work / RESULT).write_text(json.dumps(engine | watch.end()))
            # atheris has no other way out.
            sys.stderr.flush()
            os._exit(0)

    if is_guided:
        engines.guided(target, run, folder / "corpus" / name, work)
    else:
        for data in engines.mutated(target, seeds[0] if seeds else random.getrandbits(64)):
            run(data)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
