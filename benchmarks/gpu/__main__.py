"""``benchmarks/gpu/run.sh``: runs all checks, writes results.json and prints a summary."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import CHECKS, RunSetting, run_check
from warpwatch._version import __version__

ROOT = Path(__file__).resolve().parents[2]
# The time for all checks together: on a slow machine the last ones are cut short.
BUDGET_S = 580.0
SCHEMA = 2
_MARKS = {True: "ok  ", False: "BAD ", None: "    "}
# A published result must not identify the machine.
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def parse_arguments() -> argparse.Namespace:
    command = argparse.ArgumentParser(
        "benchmarks/gpu/run.sh",
        description="Check Warpwatch against the GPU and driver of this machine. The exit status "
        "is 1 if a check fails.",
    )
    command.add_argument("--fake", action="store_true", help="with the fake driver of the tests")
    command.add_argument(
        "--only", action="append", choices=[*CHECKS], metavar="CHECK", help="once or more"
    )
    command.add_argument("--out", type=Path, help="folder of the results (default $OUT, or by GPU)")
    command.add_argument(
        "--quick", action="store_true", help="short windows: tries the checks, measures nothing"
    )
    command.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="where the programs compute"
    )
    return command.parse_args()


def install_fake_driver(folder: Path) -> None:
    """Give the fake driver to this process's children. Raises CannotBuild."""
    from tests.devices.fakenvml.driver import FakeDriver, build

    # An idle GPU: nothing can run on a fake one.
    driver = FakeDriver(build(folder / "library"), folder, gpus=1, load=0)
    os.environ.update(driver.environment)


def project() -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return document


def declare_commands(folder: Path) -> None:
    """Give this process's children the entry points, which a checkout lacks."""
    commands = project()["entry-points"]["warpwatch.commands"]
    info = folder / "warpwatch.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: warpwatch\nVersion: {__version__}\n")
    lines = [f"{name} = {target}\n" for name, target in commands.items()]
    (info / "entry_points.txt").write_text("[warpwatch.commands]\n" + "".join(lines))
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"


def describe_machine(fake: bool) -> dict[str, Any]:
    """Describe the machine without identifying it."""
    gpu, driver, vbios = ("fake", None, None) if fake else _first_gpu()
    needed = [re.split(r"[^\w.-]", need)[0] for need in project()["dependencies"]]
    return {
        "gpu": gpu,
        "driver_version": driver,
        "vbios_version": vbios,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "root": os.geteuid() == 0,
        # A version is null if the package is not installed.
        "versions": {name: _version(name) for name in (*needed, "torch")},
    }


def _first_gpu() -> Sequence[str | None]:
    """Return name, driver and VBIOS; the checks have not imported what they need yet."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,vbios_version"]
    try:
        text = subprocess.check_output([*command, "--format=csv,noheader"], text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "no-gpu", None, None
    return text.splitlines()[0].split(", ")


def _version(distribution: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def default_folder(gpu: str) -> Path:
    """Return ``benchmarks/gpu/results/<gpu>-<date>``, or a build folder for the fake driver."""
    if gpu == "fake":
        return ROOT / "build" / "gpu-fake"
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return ROOT / "benchmarks/gpu/results" / f"{name}-{time.strftime('%Y-%m-%d', time.gmtime())}"


def write_results(folder: Path, machine: dict[str, Any], checks: dict[str, Any]) -> None:
    now = round(time.time(), 3)
    document = {"schema": SCHEMA, "time": now, "machine": machine, "checks": checks}
    text = _UUID.sub(r"\1-0", json.dumps(document, separators=(",", ":")))
    (folder / "results.json").write_text(f"{text}\n")


def summary(name: str, result: dict[str, Any]) -> Iterator[str]:
    why = f": {result['why']}" if result["why"] else ""
    yield f"{name}: {result['status']}{why} ({result['took_s']:.0f} s)"
    for part, figures in result["parts"].items():
        if "skipped" in figures and result["status"] != "skipped":
            yield f"  skip {part}: {figures['skipped']}"
    for line in result["lines"]:
        yield f"  {_MARKS[line['ok']]} {line['text']}"


def run(given: argparse.Namespace, out: Path, machine: dict[str, Any], work: Path) -> bool:
    setting = RunSetting(str(out), given.fake, given.quick, given.device)
    deadline = time.monotonic() + BUDGET_S
    checks: dict[str, Any] = {}
    with (out / "summary.txt").open("w") as file:
        for name in given.only or CHECKS:
            timeout_s = min(CHECKS[name][1], max(1.0, deadline - time.monotonic()))
            checks[name] = run_check(name, setting, timeout_s, work)
            write_results(out, machine, checks)
            for line in summary(name, checks[name]):
                print(line, flush=True)
                print(line, file=file, flush=True)
    return all(result["status"] != "failed" for result in checks.values())


def main() -> int:
    given = parse_arguments()
    machine = describe_machine(given.fake)
    out = given.out or Path(os.environ.get("OUT") or default_folder(machine["gpu"]))
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    print(f"{machine['gpu']}, Python {machine['python']}, results in {out}", flush=True)
    missing = [name for name, version in machine["versions"].items() if version is None]
    if missing:
        print(f"not installed: {', '.join(missing)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="warpwatch-gpu-") as name:
        work = Path(name)
        declare_commands(work / "site")
        if given.fake:
            install_fake_driver(work / "driver")
        ok = run(given, out, machine, work)
        logs = [f"--- {log.stem}\n{log.read_text(errors='replace')}" for log in work.glob("*.log")]
        (out / "checks.log").write_text("".join(logs))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
