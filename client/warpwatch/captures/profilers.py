"""Records captures of the kinds torch (a trace of torch.profiler) and nsys (Nsight Systems).

The training thread starts, stops and exports: a profiler stopped by another thread loses its
trace, and all of it holds the interpreter's lock anyway. Compression is the helper's.

The program's own profiler has precedence: while it is active ours waits, and ours ends for it. Two
sessions in a process crash: with torch 2.13, preparing one between ``prepare_trace`` and
``stop_trace`` of another is a segmentation fault, in any thread. Torch does not report that a
schedule is warming up. The start and stop methods of its profiler classes are therefore wrapped;
all Python profilers use ``torch.autograd.profiler``.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import ModuleType
from typing import Any
from weakref import WeakSet

from warpwatch import faults, rendezvous
from warpwatch.captures.recording import Recorder

SUFFIX = ".pt.trace.json.gz"
# More than any capture of some steps has; 30 bytes each.
MAX_PAUSES = 1000


class TorchRecorder(Recorder):
    """One trace.

    There is no session before the first one to warm CUPTI up: an empty session can cost all
    kernels of those after it. ``TEARDOWN_CUPTI`` is left as it is.
    """

    def __init__(self, options: tuple[str, ...]) -> None:
        self._options = options
        self._profiler: Any = None
        self._started = self._stopped = False
        self._step: Any = None
        self._pauses = _Pauses()
        # The folder of the trace until it is handed over.
        self._folder = ""

    def prepare(self) -> None:
        self._profiler = _new_profiler(self._options)
        with ours(), _inductor_left_alone():
            self._profiler.prepare_trace()

    def start(self, number: int) -> None:
        self._started = True
        with ours():
            self._profiler.start_trace()
        if "stacks" not in self._options:
            self._pauses.watch()
        self._annotate(number)

    def next_step(self, number: int) -> None:
        self._leave_step()
        self._annotate(number)

    def stop(self, about: dict[str, Any]) -> None:
        self._leave_step()
        self._pauses.leave()
        own = about | {"gc_pauses_us": self._pauses.found_us}
        self._profiler.add_metadata_json("warpwatch", json.dumps(own))
        distributed: Any = sys.modules.get("torch.distributed")
        if (
            distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
        ):
            # Of a process group torch adds them itself. Readers know ranks by it.
            known = {name: about[name] for name in ("rank", "world_size") if name in about}
            self._profiler.add_metadata_json("distributedInfo", json.dumps(known))
        with ours():
            self._profiler.stop_trace()
        self._stopped = True

    def export(self, base: str) -> None:
        folder = f"{base}.{rendezvous.token()}.tmp"
        # Kineto creates files by name with the user's umask: no one else may enter there.
        os.mkdir(folder, 0o700)
        self._folder = folder
        self._profiler.export_chrome_trace(os.path.join(folder, "trace.json"))
        # Python frees its reference cycles when it next collects. An extra collection would visit
        # each object of the program: 4 s for five million.
        self._profiler = None

    def deliver(self, base: str, beat: Callable[[], None]) -> dict[str, Any]:
        source = os.path.join(self._folder, "trace.json")

        def write(fd: int) -> None:
            self.events = rendezvous.write_gzip(source, fd, beat)
            self.size_bytes = os.stat(source).st_size + os.fstat(fd).st_size

        return {"token": rendezvous.hand_over(base, SUFFIX, write)}

    def drop(self) -> None:
        self._pauses.leave()
        try:
            if self._profiler is not None and not self._stopped:
                self._leave_step()
                with ours():
                    if not self._started:
                        # Only a session that was started can be stopped.
                        self._profiler.start_trace()
                    self._profiler.stop_trace()
        finally:
            self._profiler = None

    def discard(self, base: str) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _annotate(self, number: int) -> None:
        from torch.autograd.profiler import record_function

        self._step = record_function(f"ProfilerStep#{number}")
        self._step.__enter__()

    def _leave_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)


class _Pauses:
    """Garbage collections of the capture, which without stacks are not in torch's trace.

    ``found_us``: begin since the epoch and duration of each, at most MAX_PAUSES. The callback calls
    nothing of torch: a collection may begin anywhere.
    """

    def __init__(self) -> None:
        self.found_us: list[tuple[float, float]] = []
        self._begun_ns = 0
        # At the interpreter's end the module's names may be gone.
        self._time_ns = time.time_ns

    def watch(self) -> None:
        gc.callbacks.append(self._collected)

    def leave(self) -> None:
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        now_ns = self._time_ns()
        if phase == "start":
            self._begun_ns = now_ns
        elif self._begun_ns and len(self.found_us) < MAX_PAUSES:
            self.found_us.append((self._begun_ns / 1e3, (now_ns - self._begun_ns) / 1e3))


def _new_profiler(options: tuple[str, ...]) -> Any:
    """Return torch's profiler without its counting of steps: ours are counted already.

    All threads are never asked for: the training thread starts it, and events of memory are lost
    there (pytorch#166121).
    """
    import torch
    from torch.profiler import ProfilerActivity, _KinetoProfile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    stacks = "stacks" in options
    # Without trace_only torch builds an object of each event, which no one will look at; with
    # stacks it has to. The collector's pauses are seen by the tracer of stacks only.
    config = {"record_python_gc_info": True} if stacks else {"trace_only": True}
    return _KinetoProfile(
        activities=activities,
        with_stack=stacks,
        record_shapes="shapes" in options,
        profile_memory="memory" in options,
        **_experimental_config(**config),
    )


def _experimental_config(**wanted: Any) -> dict[str, Any]:
    """Return the profiler's argument; empty if this version does not support ``wanted``."""
    from torch._C import _profiler

    try:
        return {"experimental_config": _profiler._ExperimentalConfig(**wanted)}
    except (AttributeError, TypeError):
        return {}


@contextmanager
def _inductor_left_alone() -> Iterator[None]:
    """Keep the start of the profiler from importing torch._inductor: a second and 70 MiB.

    The profiler asks it for its CUDA graphs; a program that has not loaded it has none there.
    """
    lazy: set[str] = getattr(sys.modules["torch"], "_lazy_modules", set())
    if "_inductor" not in lazy or "torch._inductor" in sys.modules:
        yield
        return
    lazy.discard("_inductor")
    try:
        yield
    finally:
        lazy.add("_inductor")


class NsysRecorder(Recorder):
    """A range of steps for Nsight Systems, each an NVTX range; the report is Nsight's.

    ``nsys profile --capture-range=cudaProfilerApi`` starts to record at cudaProfilerStart. ``cuda``
    is torch.cuda, whose ``profiler`` raises the errors of the CUDA runtime.
    """

    def __init__(self, cuda: Any) -> None:
        self._profiler = cuda.profiler
        self._nvtx = cuda.nvtx
        self._started = False
        self._in_step = False

    def start(self, number: int) -> None:
        self._started = True
        self._profiler.start()
        self._enter_step(number)

    def next_step(self, number: int) -> None:
        self._leave_step()
        self._enter_step(number)

    def stop(self, about: dict[str, Any]) -> None:
        self.drop()

    def drop(self) -> None:
        self._leave_step()
        if self._started:
            self._started = False
            self._profiler.stop()

    def _enter_step(self, number: int) -> None:
        self._nvtx.range_push(f"step {number}")
        self._in_step = True

    def _leave_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self._nvtx.range_pop()


PROFILER_MODULE = "torch.autograd.profiler"

# Class, its methods that begin a session, the one that ends it.
_WATCHED = (
    ("profile", ("_prepare_trace", "_start_trace"), "__exit__"),
    ("emit_nvtx", ("__enter__",), "__exit__"),
    ("emit_itt", ("__enter__",), "__exit__"),
)
_active: WeakSet[Any] = WeakSet()
_ours = 0  # the thread that calls torch's profiler for us just now
_listener: Callable[[], None] | None = None


def program_profiles() -> bool:
    """Return whether a profiler of the program warms up or records, in any thread."""
    return len(_active) > 0


def listen(callback: Callable[[], None]) -> None:
    """Call ``callback`` before the program's profiler starts, in its thread."""
    global _listener
    _listener = callback


def forget_program_profilers() -> None:
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


def watch_program_profiler(module: ModuleType) -> None:
    """Watch the classes of the imported module ``torch.autograd.profiler``, once."""
    for name, begins, end in _WATCHED:
        found = getattr(module, name, None)
        if found is None or not hasattr(found, end):
            continue
        for begin in begins:
            if hasattr(found, begin):
                _wrap(found, begin, before=_before_begin)
        _wrap(found, end, after=_active.discard)


def _wrap(
    owner: type,
    name: str,
    before: Callable[[Any], object] = bool,
    after: Callable[[Any], object] = bool,
) -> None:
    original = getattr(owner, name)
    if hasattr(original, "_warpwatch"):
        return

    @functools.wraps(original)
    def call(profiler: Any, *args: Any, **kwargs: Any) -> Any:
        before(profiler)
        try:
            return original(profiler, *args, **kwargs)
        finally:
            after(profiler)

    call._warpwatch = True  # type: ignore[attr-defined]
    setattr(owner, name, call)


@faults.guarded
def _before_begin(profiler: Any) -> None:
    if _ours != get_ident() and getattr(profiler, "enabled", True):
        _active.add(profiler)
        if _listener is not None:
            _listener()
