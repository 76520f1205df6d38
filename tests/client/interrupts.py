"""Ctrl-C at every line of the shim, one after the other."""

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted(work: Callable[[], Any], functions: tuple[str, ...], line: int) -> bool:
    """Whether ``work`` came so far: to that many lines of the shim's functions of these names.

    Lines before and after a call: elsewhere Python does not look for signals.
    """
    left = line
    after_call = False

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left, after_call
        if event == "line":
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if text.strip() == "try:":
                # Nothing runs there, and it may be outside of the blocks that it is in.
                return local
            calls = "(" in text
            left -= calls or after_call
            after_call = calls
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        ours = "client/warpwatch/" in code.co_filename and code.co_name in functions
        return local if ours else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
