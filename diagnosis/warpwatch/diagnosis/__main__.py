"""``python -m warpwatch.diagnosis``, and ``warpwatch diagnose``, which calls it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from warpwatch.diagnosis.diagnosis import HEALTHY, diagnose
from warpwatch.diagnosis.errors import TraceError
from warpwatch.diagnosis.html import render_html
from warpwatch.diagnosis.text import render_text

EXIT_HEALTHY, EXIT_PROBLEM, EXIT_UNUSABLE = 0, 1, 2
PROGRAM = "python -m warpwatch.diagnosis"


def main(argv: Sequence[str] | None = None, prog: str = PROGRAM) -> int:
    """Exit status: 0 healthy, 1 a problem or inconclusive, 2 usage or unusable input."""
    arguments = _parser(prog).parse_args(argv)
    try:
        diagnosis = diagnose(arguments.trace, arguments.baseline)
        if arguments.html is not None:
            arguments.html.write_text(render_html(diagnosis), encoding="utf-8")
    except TraceError as error:
        return _unusable(prog, str(error))
    except OSError as error:
        return _unusable(prog, f"{error.filename}: {error.strerror}")
    if arguments.json:
        output = json.dumps(diagnosis.to_json(), indent=1) + "\n"
    else:
        output = render_text(diagnosis)
    sys.stdout.write(output)
    return EXIT_HEALTHY if diagnosis.verdict == HEALTHY else EXIT_PROBLEM


def _unusable(prog: str, reason: str) -> int:
    sys.stderr.write(f"{prog}: {' '.join(reason.split())}\n")
    return EXIT_UNUSABLE


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Say from torch.profiler traces where a training step's time goes, and why.",
        epilog=f"example: {prog} rank0.pt.trace.json.gz rank1.pt.trace.json.gz --html report.html\n"
        "exit status: 0 healthy, 1 a problem was found or nothing can be concluded, 2 bad input",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trace", nargs="+", type=Path, help="Kineto trace (.json or .json.gz), one a rank"
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
