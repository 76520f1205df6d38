"""Provides ``python -m warpwatch_diagnosis``, which ``warpwatch diagnose`` calls."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from warpwatch_diagnosis.diagnosis import NO_PROBLEM, Diagnosis, diagnose
from warpwatch_diagnosis.findings import RequestingAnomaly
from warpwatch_diagnosis.report.html import render_html
from warpwatch_diagnosis.report.text import render_text
from warpwatch_diagnosis.trace.files import TraceError

EXIT_HEALTHY, EXIT_PROBLEM, EXIT_UNUSABLE = 0, 1, 2
PROGRAM = "python -m warpwatch_diagnosis"


def main(
    argv: Sequence[str] | None = None,
    prog: str = PROGRAM,
    missing: Mapping[int, str] | None = None,
    nodes: Mapping[int, str] | None = None,
    anomaly: RequestingAnomaly | None = None,
    reading: Callable[[int, int, str], None] = lambda number, count, name: None,
) -> int:
    """Run the command and return its exit status; the other arguments are those of ``diagnose``.

    0: healthy, 1: a problem or inconclusive, 2: usage, unusable input or output.
    """
    arguments = _parser(prog).parse_intermixed_args(argv)
    read = [*arguments.trace, *arguments.baseline]
    try:
        page = arguments.html
        exists = page is not None and page.exists()
        if exists and any(path.exists() and page.samefile(path) for path in read):
            return _unusable(prog, f"{page}: is a trace to read; name another file to write")
        diagnosis = diagnose(
            arguments.trace, arguments.baseline, missing, nodes, anomaly, reading=reading
        )
        if page is not None:
            page.write_text(render_html(diagnosis), encoding="utf-8")
        _print(diagnosis, arguments.json)
    except TraceError as error:
        return _unusable(prog, str(error))
    except BrokenPipeError:
        # The reader of the output has closed it.
        _close_output()
    except OSError as error:
        if error.filename is None:
            _close_output()
        return _unusable(prog, f"{error.filename or 'output'}: {error.strerror or error}")
    except MemoryError:
        return _unusable(prog, "out of memory; capture fewer steps")
    return EXIT_HEALTHY if diagnosis.verdict in NO_PROBLEM else EXIT_PROBLEM


def _print(diagnosis: Diagnosis, as_json: bool) -> None:
    output = json.dumps(diagnosis.to_json(), indent=1) + "\n" if as_json else render_text(diagnosis)

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(output.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _close_output() -> None:
    """Close the output: otherwise Python flushes it again at exit, with the same error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unusable(prog: str, reason: str) -> int:
    sys.stderr.write(f"{prog}: {' '.join(reason.split())}\n")
    return EXIT_UNUSABLE


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Say from torch.profiler traces where a training step's time goes, and why.",
        epilog=f"example: {prog} rank0.pt.trace.json.gz rank1.pt.trace.json.gz --html report.html\n"
        "exit status: 0 healthy, 1 a problem was found or nothing can be concluded, 2 bad input "
        "or output",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trace",
        nargs="+",
        type=Path,
        help="Kineto trace (.json or .json.gz), one a rank; for `warpwatch diagnose` also the "
        "address of a capture in the remote store (s3://…/<capture-id>/)",
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report to FILE as well")
    parser.add_argument(
        "--baseline",
        nargs="+",
        type=Path,
        default=(),
        metavar="TRACE",
        help="traces of the same job from when it was well",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
