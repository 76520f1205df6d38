"""``python -m warpwatch run``: the only command of this distribution."""

from __future__ import annotations

import sys

from warpwatch import launch


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        return launch.main(arguments[1:])
    if arguments[:1] in (["--help"], ["-h"]):
        return launch.main(["--help"])
    sys.stderr.write("python -m warpwatch: the command is run; see run --help\n")
    return 2


sys.exit(main(sys.argv[1:]))
