"""Gives the program's own profiler precedence: while it is active ours waits, and ours ends for it.

Two sessions in a process crash: with torch 2.13, preparing one between ``prepare_trace`` and
``stop_trace`` of another is a segmentation fault, in any thread. Torch does not report that a
schedule is warming up. The start and stop methods of its profiler classes are therefore wrapped;
all Python profilers use ``torch.autograd.profiler``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import ModuleType
from typing import Any
from weakref import WeakSet

from warpwatch import faults

MODULE = "torch.autograd.profiler"

# Class, its methods that begin a session, the one that ends it.
_WATCHED = (
    ("profile", ("_prepare_trace", "_start_trace"), "__exit__"),
    ("emit_nvtx", ("__enter__",), "__exit__"),
    ("emit_itt", ("__enter__",), "__exit__"),
)
_active: WeakSet[Any] = WeakSet()
_ours = 0  # the thread that calls torch's profiler for us just now
_listener: Callable[[], None] | None = None


def active() -> bool:
    """Return whether a profiler of the program warms up or records, in any thread."""
    return len(_active) > 0


def listen(callback: Callable[[], None]) -> None:
    """Call ``callback`` before the program's profiler starts, in its thread."""
    global _listener
    _listener = callback


def drop() -> None:
    """Forget the parent's profilers in a forked child, where they do not run."""
    global _listener
    _listener = None
    _active.clear()


@contextmanager
def ours() -> Iterator[None]:
    """Mark this thread's profiler calls inside the block as ours."""
    global _ours
    _ours = get_ident()
    try:
        yield
    finally:
        _ours = 0


def watch(module: ModuleType) -> None:
    """Watch the classes of the imported module ``torch.autograd.profiler``, once."""
    for name, begins, end in _WATCHED:
        found = getattr(module, name, None)
        if found is None or not hasattr(found, end):
            continue
        for begin in begins:
            if hasattr(found, begin):
                _wrap(found, begin, _before_begin, None)
        _wrap(found, end, None, _active.discard)


def _wrap(
    owner: type,
    name: str,
    before: Callable[[Any], None] | None,
    after: Callable[[Any], None] | None,
) -> None:
    original = getattr(owner, name)
    if hasattr(original, "_warpwatch"):
        return

    @functools.wraps(original)
    def call(profiler: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(profiler)
        try:
            return original(profiler, *args, **kwargs)
        finally:
            if after is not None:
                after(profiler)

    call._warpwatch = True  # type: ignore[attr-defined]
    setattr(owner, name, call)


def _before_begin(profiler: Any) -> None:
    try:
        if _ours == get_ident() or not getattr(profiler, "enabled", True):
            return
        _active.add(profiler)
        if _listener is not None:
            _listener()
    except Exception as error:
        faults.swallow(error)
