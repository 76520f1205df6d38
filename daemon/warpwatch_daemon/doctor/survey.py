"""Asking the driver without being held up by it: a child asks, its answers are read as they come.

A call that never returns, or a library that crashes, costs the child alone; what it reported
before is kept, and the question without an answer is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from warpwatch_daemon.doctor.facts import DeviceFacts, Survey
from warpwatch_daemon.doctor.questions import QUESTIONS
from warpwatch_telemetry.errors import WarpwatchError

DEFAULT_PATIENCE_S = 10.0
# For a child that was killed or has said its last.
_GOODBYE_S = 2.0
# How NVML writes numbers that it does not have (NVML_VALUE_NOT_AVAILABLE).
_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)
_MODULE = "warpwatch_daemon.doctor.interview"


def read(fd: int, timeout_s: float | None) -> bytes | None:
    """Return what the child has written, b"" at its end, or None after a silence of this time."""
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    return os.read(fd, 1 << 16) if ready.poll(timeout_s and 1000 * timeout_s) else None


def ask_driver(
    patience_s: float = DEFAULT_PATIENCE_S,
    read: Callable[[int, float | None], bytes | None] = read,
) -> Survey:
    """Every answer of the driver; whoever is silent for ``patience_s`` is stuck.

    Raises WarpwatchError where no child can be started.
    """
    child = _start()
    assert child.stdout is not None
    answers, silent = _listen(partial(read, child.stdout.fileno()), patience_s)
    if silent:
        child.kill()
    # A child that hangs inside the kernel survives even this; it is left behind.
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GOODBYE_S)
    child.stdout.close()
    crashed = not silent and child.returncode is not None and child.returncode < 0
    return _survey(answers, patience_s, -child.returncode if crashed else None)


def _start() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        raise WarpwatchError(f"cannot start {sys.executable}: {error.strerror}") from error


def _listen(
    read: Callable[[float | None], bytes | None], patience_s: float
) -> tuple[list[Any], bool]:
    """The answers, and whether they ceased without an end."""
    answers: list[Any] = []
    # The child's first line comes before it touches the driver, however slowly it starts.
    timeout_s = None
    rest = b""
    while (data := read(timeout_s)) is not None:
        if not data:
            return answers, False
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                answers.append(json.loads(line))
        timeout_s = patience_s
    return answers, True


def _survey(answers: list[Any], patience_s: float, crashed_by: int | None) -> Survey:
    common = {a["question"]: a for a in answers if a["device"] is None}

    def value(question: str) -> Any:
        answer = common.get(question)
        return answer["value"] if answer and answer["code"] == 0 else None

    started = common.get("initialise", {"code": None, "value": ""})
    return Survey(
        patience_s=patience_s,
        code=started["code"],
        error=started["value"] or "",
        crashed_by=crashed_by,
        library=value("library"),
        driver_version=value("driver_version"),
        nvml_version=value("nvml_version"),
        cuda_version=value("cuda_version"),
        count=value("count"),
        count_code=common["count"]["code"] or None if "count" in common else None,
        devices=tuple(_device(index, answers) for index in range(value("count") or 0)),
        ancestors=_pairs(answers, "ancestor"),
        peer_access=_pairs(answers, "peer access"),
    )


def _device(index: int, answers: list[Any]) -> DeviceFacts:
    answered = {a["question"]: a for a in answers if a["device"] == index}
    unanswered = [question for question in QUESTIONS if question not in answered]
    waiting_for = None if "done" in answered else (unanswered or ["a pair of GPUs"])[0]
    if not answered:
        waiting_for = "handle"
    values = {
        q: a["value"]
        for q, a in answered.items()
        if q in QUESTIONS and a["code"] == 0 and _known(a["value"])
    }
    asked = {*QUESTIONS, "handle"}
    codes = {q: a["code"] for q, a in answered.items() if q in asked and a["code"] != 0}
    facts = {"index": index, "codes": codes, "waiting_for": waiting_for, **values}
    return msgspec.convert(facts, DeviceFacts, strict=False)


def _known(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return not any(isinstance(each, int) and each in _NOT_AVAILABLE for each in numbers)


def _pairs(answers: list[Any], subject: str) -> dict[tuple[int, int], int]:
    found = {}
    for answer in answers:
        about, _, peer = str(answer["question"]).rpartition(" ")
        if about == subject and answer["code"] == 0:
            first, second = sorted((int(answer["device"]), int(peer)))
            found[first, second] = int(answer["value"])
    return found
