"""A reader that does all that none may do, for the tests of the campaigns."""

import os
import signal
import time
from pathlib import Path

from tests.fuzz import watch

KEPT: list[object] = []


def run(data: bytes) -> None:
    if data == b"raises":
        raise ValueError("it was asked to")
    if data == b"spins":
        end = time.process_time() + watch.MAX_INPUT_S + 0.1
        while time.process_time() < end:
            pass
    if data == b"grows":
        KEPT.extend(bytearray(1) for _ in range(200_000))
    if data == b"dies":
        os.kill(os.getpid(), signal.SIGKILL)


def target(folder: Path) -> watch.Target:
    return watch.Target(run, [b"fine", b"dies"])
