"""Some inputs for every target, and campaigns whose target does what none may do."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fuzz import watch
from tests.fuzz.__main__ import BROKEN, ROOT, TARGETS
from tests.fuzz.targets import broken
from tests.fuzz.watch import Findings, Watch
from tests.waiting import DEADLINE_S


def campaign(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status, and the line of each target."""
    command = [sys.executable, "-m", "tests.fuzz", "--folder", str(folder), "--seed", "1"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_nothing_is_found_in_the_first_inputs(tmp_path: Path) -> None:
    status, lines = campaign(tmp_path, "--here", "--inputs", "60")
    texts = [path.read_text() for path in tmp_path.glob("findings/*.txt")]
    assert (status, texts) == (0, [])
    assert [line["target"] for line in lines] == TARGETS
    assert min(line["inputs"] for line in lines) > 60


def test_what_raises_spins_or_grows_is_found_once(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "MIN_INPUTS", 4)
    monkeypatch.setattr(watch, "MAX_INPUT_S", 0.1)
    findings = Findings(tmp_path, BROKEN)
    watched = Watch(broken.target(tmp_path), tmp_path, findings, inputs=4, seconds=math.inf)
    for data in (b"raises", b"raises", b"spins", b"grows"):
        watched(data)
    found = [Path(path) for path in watched.end()["findings"]]
    assert [path.read_bytes() for path in found] == [b"raises", b"spins", b""]
    said = [path.with_suffix(".txt").read_text() for path in found]
    assert "ValueError: it was asked to" in said[0]
    assert said[1].startswith("took 0.")
    assert said[2].startswith("blocks ")


def test_an_input_that_the_process_dies_of_is_kept(tmp_path: Path) -> None:
    status, (line,) = campaign(tmp_path, "--target", BROKEN, "--minutes", "5")
    (path,) = map(Path, line["findings"])
    assert (status, path.read_bytes()) == (1, b"dies")
    assert path.with_suffix(".txt").read_text().startswith("exit status -9")
