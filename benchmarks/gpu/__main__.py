"""``benchmarks/gpu/run.sh``: all checks, their results in one file, a summary as they end."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.gpu import results
from benchmarks.gpu.report import RunSetting
from benchmarks.gpu.runner import CHECKS_S, run_check
from warpwatch._version import __version__

# Of all checks together: on a slow machine the last ones are cut short.
BUDGET_S = 580.0


def arguments() -> argparse.Namespace:
    command = argparse.ArgumentParser(
        "benchmarks/gpu/run.sh",
        description="Check Warpwatch against the GPU and driver of this machine. Exit 1 when "
        "something is not as it should be.",
    )
    command.add_argument("--fake", action="store_true", help="with the fake driver of the tests")
    command.add_argument(
        "--only", action="append", choices=[*CHECKS_S], metavar="CHECK", help="once or more"
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
    """For this process's children. Raises CannotBuild."""
    from tests.devices.fakenvml.driver import FakeDriver, build

    # Idle, as a GPU is on which nothing can run.
    driver = FakeDriver(build(folder / "library"), folder, gpus=1, load=0)
    os.environ.update(driver.environment)


def declare_commands(folder: Path) -> None:
    """For this process's children: a checkout alone has none of the entry points."""
    project = tomllib.loads((results.ROOT / "pyproject.toml").read_text())["project"]
    commands = project["entry-points"]["warpwatch.commands"]
    info = folder / "warpwatch.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: warpwatch\nVersion: {__version__}\n")
    lines = [f"{name} = {target}\n" for name, target in commands.items()]
    (info / "entry_points.txt").write_text("[warpwatch.commands]\n" + "".join(lines))
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"


def run(given: argparse.Namespace, out: Path, measured_on: dict[str, Any], work: Path) -> bool:
    """Whether all is as it should be."""
    setting = RunSetting(str(out), given.fake, given.quick, given.device)
    deadline = time.monotonic() + BUDGET_S
    checks: dict[str, Any] = {}
    with (out / "summary.txt").open("w") as file:
        for name in given.only or CHECKS_S:
            timeout_s = min(CHECKS_S[name], max(1.0, deadline - time.monotonic()))
            checks[name] = run_check(name, setting, timeout_s, work)
            results.write(out, measured_on, checks)
            for line in results.summary(name, checks[name]):
                print(line, flush=True)
                print(line, file=file, flush=True)
    return all(result["status"] != "failed" for result in checks.values())


def main() -> int:
    given = arguments()
    measured_on = results.machine(given.fake)
    out = given.out or Path(os.environ.get("OUT") or results.default_folder(measured_on["gpu"]))
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    print(f"{measured_on['gpu']}, Python {measured_on['python']}, results in {out}", flush=True)
    missing = [name for name, version in measured_on["versions"].items() if version is None]
    if missing:
        print(f"not installed: {', '.join(missing)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="warpwatch-gpu-") as name:
        work = Path(name)
        # A part that gives up root's rights still needs the fake driver.
        work.chmod(0o755)
        declare_commands(work / "site")
        if given.fake:
            install_fake_driver(work / "driver")
        ok = run(given, out, measured_on, work)
        logs = [f"--- {log.stem}\n{log.read_text(errors='replace')}" for log in work.glob("*.log")]
        (out / "checks.log").write_text("".join(logs))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
