"""Verifies that a trace holds what was requested, in a process of its own.

Run as ``python -m warpwatch_capturing.verification FILE EXPECTATION``, where EXPECTATION
is JSON: the last line of its output is JSON, ``[events, problems]``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from warpwatch_capturing.confinement import (
    TIMEOUT_S,
    OpenedFile,
    Run,
    confine,
    cpu_limit_s,
    run,
)
from warpwatch_diagnosis.trace.files import TraceError
from warpwatch_diagnosis.trace.reader import TraceInventory, take_inventory
from warpwatch_telemetry import clean_text

# One value of a trace may be 16 MiB of text; everything else is forgotten at once.
MEMORY_BYTES = 512 << 20
# Kernels run after the step that launched them; what lies further off than this, or than the
# steps are long, has a broken clock.
SLACK_S = 10.0
# The kinds of problems; the text of a problem begins with one of them.
UNREADABLE = "unreadable"
NO_OPERATORS = "no_operators"
NO_KERNELS = "no_kernels"
STEPS = "steps"
RANK = "rank"
TIMESTAMPS = "timestamps"
PROBLEMS = (UNREADABLE, NO_OPERATORS, NO_KERNELS, STEPS, RANK, TIMESTAMPS)


_Verified = tuple[Annotated[int, Meta(ge=0, le=2**40)] | None, tuple[str, ...]]
_DECODER: msgspec.json.Decoder[_Verified] = msgspec.json.Decoder(_Verified)


@dataclass(frozen=True, slots=True)
class Expectation:
    """The required content of a rank's trace.

    rank: None if it is not known. first_step, last_step: None for a window of time, whose trace
    need not name its rank. window_s: the longest span of such a trace, None if not known. on_gpu:
    whether the rank computes on a GPU, so that there must be kernels. If the trace does not know
    of a GPU either, the device is a simulated one.
    """

    rank: int | None
    first_step: int | None = None
    last_step: int | None = None
    window_s: float | None = None
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class TraceVerdict:
    """events: how many the trace lists, None when it cannot be read to its end."""

    events: int | None
    problems: tuple[str, ...]


def verify(
    folder: Path, expected: Mapping[str, Expectation], run: Run = run
) -> dict[str, TraceVerdict]:
    """Return the verdict on each file of a stored capture; blocks until they are read."""
    return {
        name: _verify_file(folder / name, expectation, run)
        for name, expectation in expected.items()
    }


def _verify_file(path: Path, expectation: Expectation, run: Run) -> TraceVerdict:
    try:
        # Each file has the time limit for itself, so that one does not delay the others.
        ended = run(__name__, [str(path), json.dumps(asdict(expectation))], TIMEOUT_S, ())
        events, lacks = _verified(ended.lines[-1])
    except OSError as error:
        return TraceVerdict(None, (f"{UNREADABLE}: {error.strerror}",))
    except (ValueError, IndexError):
        reason = ended.killed_by or f"exit status {ended.status}"
        return TraceVerdict(None, (f"{UNREADABLE}: {reason}",))
    return TraceVerdict(events, lacks)


def problems(found: TraceInventory, expected: Expectation) -> list[str]:
    """Return what a trace lacks; each text begins with one of PROBLEMS."""
    lacks = [*_step_problems(found, expected), *_rank_problems(found, expected)]
    if not found.counts["operator"]:
        lacks.append(NO_OPERATORS)
    if expected.on_gpu and found.sees_gpu and not found.counts["kernel"]:
        lacks.append(f"{NO_KERNELS}: the rank computes on a GPU")
    return [*lacks, *_time_problems(found, expected)]


def _step_problems(found: TraceInventory, expected: Expectation) -> Iterator[str]:
    if expected.first_step is None or expected.last_step is None:
        return
    wanted = range(expected.first_step, expected.last_step + 1)
    if set(found.steps) != set(wanted):
        yield f"{STEPS}: {_numbers(sorted(found.steps))} instead of {_numbers(wanted)}"


def _numbers(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    whole = steps[-1] - steps[0] + 1 == len(steps)
    return f"{steps[0]} to {steps[-1]}" if whole else ", ".join(map(str, steps[:10]))


def _rank_problems(found: TraceInventory, expected: Expectation) -> Iterator[str]:
    if found.rank is None and expected.first_step is not None:
        yield f"{RANK}: not said"
    elif None not in (found.rank, expected.rank) and found.rank != expected.rank:
        yield f"{RANK}: {found.rank} instead of {expected.rank}"


def _time_problems(found: TraceInventory, expected: Expectation) -> Iterator[str]:
    if found.untimed:
        yield f"{TIMESTAMPS}: {found.untimed} events have none that can be"
    if found.begin_us is None or found.end_us is None:
        return
    span_s = (found.end_us - found.begin_us) / 1e6
    if found.steps:
        begin_us = min(begin for begin, _ in found.steps.values())
        end_us = max(end for _, end in found.steps.values())
        slack_us = max(SLACK_S * 1e6, end_us - begin_us)
        outside = found.begin_us < begin_us - slack_us or found.end_us > end_us + slack_us
    else:
        window_s = expected.window_s
        outside = window_s is not None and span_s > window_s + max(SLACK_S, window_s)
    if outside:
        yield f"{TIMESTAMPS}: events {span_s:,.1f} s apart, outside what was recorded"


def main(arguments: Sequence[str], confine: Callable[[int, int], None] = confine) -> int:
    path, expectation = Path(arguments[0]), Expectation(**json.loads(arguments[1]))
    trace = OpenedFile(path)
    confine(MEMORY_BYTES, cpu_limit_s([path]))
    result: list[Any]
    try:
        found = take_inventory(trace)
        result = [found.listed, problems(found, expectation)]
    except TraceError as error:
        result = [None, [f"{UNREADABLE}: {str(error).removeprefix(f'{trace}: ')}"]]
    except MemoryError:
        result = [None, [f"{UNREADABLE}: it takes more than {MEMORY_BYTES >> 20} MiB"]]
    sys.stdout.write(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def _verified(line: str) -> tuple[int | None, tuple[str, ...]]:
    """Return the events of a trace and what it lacks. Raises ValueError."""
    return _DECODER.decode(clean_text.clean_line(line.encode()))
