"""Whether the thread that trains has come to its end while its process lives on.

It has ended, or it is back at a prompt: of Python's own, where no code runs in it, or of IPython
and of a notebook, where the shell runs none. Then no step is to be expected.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

# What runs a cell, a script or a module in IPython's shell, which is the notebook's too.
_SHELL_FILE = "interactiveshell.py"
_SHELL_RUNS = frozenset({"run_code", "safe_execfile", "safe_run_module"})


def is_over(trainer: threading.Thread, ident: int) -> bool:
    """``ident``: of the thread, 0 before there is one."""
    if not ident:
        return False
    try:
        if not trainer.is_alive():
            return True
    except RuntimeError:
        # A thread that Python has not started says so in this way.
        return True
    frame = sys._current_frames().get(ident)
    return frame is None or (_has_shell() and not _shell_runs(frame))


def _has_shell() -> bool:
    shell: Any = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None


def _shell_runs(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name in _SHELL_RUNS and code.co_filename.endswith(_SHELL_FILE):
            return True
        frame = frame.f_back
    return False
