"""``python -m tests.fuzz``: hostile bytes for everything that reads what a stranger wrote.

One JSON line a target; exit status 1 with findings. Each is a file in the folder ``findings``, and
``--reproduce FILE`` runs it again.
"""

import argparse
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz import engines
from tests.fuzz.child import RESULT, load
from tests.fuzz.watch import Findings, Watch, newest

# The target of the tests of the campaigns themselves.
BROKEN = "broken"
# Readers of untrusted input; each is a module of ``targets``.
MODULES = (Path(__file__).parent / "targets").glob("*.py")
TARGETS = sorted({path.stem for path in MODULES} - {BROKEN})
ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
# In wall clock time: a target that waits hangs too, and uses no processor time.
HANGS_AFTER_S, STARTS_WITHIN_S = 30.0, 180.0
# Millions of small files are not for a disk.
MEMORY = Path("/dev/shm")


def main() -> int:
    arguments = _arguments()
    if arguments.reproduce is not None:
        with tempfile.TemporaryDirectory() as work:
            name = arguments.reproduce.stem.rpartition("-")[0]
            load(name, Path(work)).run(arguments.reproduce.read_bytes())
        return 0
    names = arguments.target or TARGETS
    seconds = arguments.minutes * 60 * min(PROCESSES, len(names)) / len(names)
    limits = [str(arguments.inputs), str(seconds), *map(str, arguments.seed)]
    campaign = partial(run_here if arguments.here else run, folder=arguments.folder, limits=limits)
    found = False
    with ThreadPoolExecutor(PROCESSES) as processes:
        results = map(campaign, names) if arguments.here else processes.map(campaign, names)
        for result in results:
            print(json.dumps(result), flush=True)
            found = found or bool(result["findings"])
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--inputs", type=int, default=10**18, help="of each target at most")
    parser.add_argument("--target", action="append", choices=[*TARGETS, BROKEN])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument(
        "--seed", type=int, nargs=1, default=[], help="mutations alone, the same ones each time"
    )
    parser.add_argument(
        "--here", action="store_true",
        help="in this process, without --minutes; --inputs after the seeds; needs --seed",
    )  # fmt: skip
    parser.add_argument("--reproduce", type=Path, metavar="FILE", help="run one finding's input")
    return parser.parse_args()


def run(name: str, *, folder: Path, limits: list[str]) -> dict[str, Any]:
    """One target's campaign in a process of its own: the JSON line about it."""
    memory = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as work, tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "tests.fuzz.child", name, work, str(folder), *limits]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        died = _wait(process, Path(work))
        log.seek(0)
        said = log.read()
        if died is None:
            result: dict[str, Any] = json.loads((Path(work) / RESULT).read_text())
        else:
            done, _, data = newest(Path(work))
            findings = Findings(folder / "findings", name)
            findings.add("died", data, f"{died}\n{said[-50_000:]}")
            result = {"inputs": done, "seconds": 0.0, "findings": findings.paths}
    coverage = re.findall(r"cov: (\d+) ", said)
    about = {
        "per_s": round(result["inputs"] / max(result["seconds"], 1.0)),
        "coverage": int(coverage[-1]) if coverage else None,
    }
    return {"target": name, **about, **result}


def run_here(name: str, *, folder: Path, limits: list[str]) -> dict[str, Any]:
    """The seeds and so many mutations: of a few inputs, imports are most of what they take."""
    inputs, seed = int(limits[0]), int(limits[2])
    with tempfile.TemporaryDirectory() as work:
        target = load(name, Path(work))
        watch = Watch(target, Path(work), Findings(folder / "findings", name), inputs, math.inf)
        count = len(target.seeds) + inputs
        for data in itertools.islice(engines.mutated(target, seed), count):
            watch(data)
        return {"target": name, **watch.end()}


def _wait(process: subprocess.Popen[bytes], work: Path) -> str | None:
    """Why it has no result; None where it ended in order."""
    begun = time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        # Looked at twice: the process may just have been writing it.
        looks = newest(work), newest(work)
        inputs, seconds, _ = min(looks, key=lambda look: look[1])
        is_late = not inputs and time.monotonic() - begun > STARTS_WITHIN_S
        if seconds > HANGS_AFTER_S or is_late:
            process.kill()
            process.wait()
            return f"hangs for {seconds:.0f} s after {inputs} inputs"
    return f"exit status {process.returncode}" if process.returncode else None


if __name__ == "__main__":
    sys.exit(main())
