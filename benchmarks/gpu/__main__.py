"""`benchmarks/gpu/run.sh`: all checks, their results in one file, a summary on standard output."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import results
from benchmarks.gpu.check import Setting
from benchmarks.gpu.registry import BUDGET_S, TIMEOUTS_S
from benchmarks.gpu.runner import run_all

ROOT = Path(__file__).resolve().parents[2]
FAKE_PROFILE, FAKE_GPUS = "h100", 1


def arguments() -> argparse.Namespace:
    command = argparse.ArgumentParser(
        "benchmarks/gpu/run.sh",
        description="Check Warpwatch against the GPU and driver of this machine. Exit 1 when "
        "something is not as it should be.",
    )
    command.add_argument("--fake", action="store_true", help="with the fake driver of the tests")
    command.add_argument(
        "--only", action="append", choices=[*TIMEOUTS_S], metavar="CHECK", help="once or more"
    )
    command.add_argument("--out", type=Path, help="folder of the results (default $OUT, or by GPU)")
    command.add_argument(
        "--quick", action="store_true", help="short windows: tries the checks, measures nothing"
    )
    command.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="where the programs compute"
    )
    command.add_argument("--budget-s", type=float, default=BUDGET_S, help="of all checks together")
    return command.parse_args()


def install_fake_driver(folder: Path) -> None:
    """For this process's children. Raises CannotBuild."""
    from tests.devices.fakenvml.driver import FakeDriver, build

    # Idle, as a GPU is on which nothing can run.
    driver = FakeDriver(build(folder / "library"), folder, FAKE_PROFILE, FAKE_GPUS, load=0)
    os.environ.update(driver.environment)


def main() -> int:
    given = arguments()
    began = time.time()
    out = given.out or Path(os.environ.get("OUT") or results.default_folder(ROOT, given.fake))
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    chosen = {name: s for name, s in TIMEOUTS_S.items() if not given.only or name in given.only}
    setting = Setting(out, given.fake, given.quick, given.device)
    checks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="warpwatch-gpu-") as name:
        # A part that gives up root's rights still needs the fake driver.
        os.chmod(name, 0o755)
        if given.fake:
            install_fake_driver(Path(name) / "driver")
        on = results.machine(given.fake)
        say(out, f"{on['gpu']}, Python {on['python']}, results in {out}", new=True)
        if on["missing"]:
            say(out, f"not installed: {', '.join(on['missing'])}")
        for check in run_all(chosen, given.budget_s, setting, Path(name)):
            checks.append(check)
            results.write(out, on, checks, began)
            say(out, "\n".join(results.summary(check)))
        keep_logs(out, Path(name))
    return 1 if any(check["status"] in ("failed", "timed_out") for check in checks) else 0


def say(out: Path, text: str, new: bool = False) -> None:
    """To standard output and into summary.txt."""
    print(text, flush=True)
    with (out / "summary.txt").open("w" if new else "a") as file:
        file.write(f"{text}\n")


def keep_logs(out: Path, work: Path) -> None:
    """What the checks have written to standard error, in one file."""
    with (out / "checks.log").open("wb") as together:
        for log in sorted(work.glob("*.log")):
            together.write(f"--- {log.stem}\n".encode())
            with log.open("rb") as file:
                shutil.copyfileobj(file, together)


if __name__ == "__main__":
    sys.exit(main())
