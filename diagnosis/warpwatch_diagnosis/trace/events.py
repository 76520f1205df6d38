"""Elements of a trace's JSON become Events, or are left out.

What events have in common (names, threads, arguments) is kept once, so that an event takes about
200 bytes; how much of it there can be is bounded, whatever the file holds.
"""

from __future__ import annotations

import marshal
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from operator import eq, itemgetter
from typing import Any, Literal, NamedTuple, TypeGuard

import msgspec

from warpwatch_diagnosis.trace.files import TraceError
from warpwatch_diagnosis.trace.json_stream import decode_json

Kind = Literal[
    "operator", "annotation", "runtime", "kernel", "copy", "synchronization", "python", "memory"
]

_COLLECTIVE_ARGUMENTS = (
    "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size",
    "Process Group Name", "Process Group Ranks", "Seq",
)  # fmt: skip

# As written from 2022 on (lower case) and before (capitalised).
_CATEGORIES: dict[Kind, tuple[str, ...]] = {
    "operator": ("cpu_op", "Operator"),
    "annotation": ("user_annotation",),
    "runtime": (
        "cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "mtia_runtime",
        "privateuse1_runtime", "privateuse1_driver", "Runtime",
    ),
    "kernel": ("kernel", "Kernel"),
    "copy": ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"),
    "synchronization": ("cuda_sync",),
    "python": ("python_function",),
}  # fmt: skip
KINDS = {category: kind for kind, names in _CATEGORIES.items() for category in names}
# An instant; PyTorch before 1.12 gives it no category.
MEMORY_NAME = "[memory]"
CONCRETE = "Concrete Inputs"
# Of it only this is kept: a convolution's backward call that makes the gradient of its input or of
# its weight alone.
ONE_GRADIENT = "One gradient"
# What diagnosis reads of an event's ``args``; the rest is forgotten.
ARGUMENTS: dict[Kind, tuple[str, ...]] = {
    "operator": ("Input Dims", "Input type", "Call stack", CONCRETE, *_COLLECTIVE_ARGUMENTS),
    "kernel": (
        "device", "stream", "grid", "block", "blocks per SM", "warps per SM",
        "est. achieved occupancy %", "graph id", *_COLLECTIVE_ARGUMENTS,
    ),
    "copy": ("device", "stream", "bytes", "memory bandwidth (GB/s)"),
    "synchronization": ("device", "stream", "wait_on_stream"),
    "memory": ("Device Type", "Device Id", "Bytes", "Total Allocated", "Total Reserved"),
}  # fmt: skip


_REFUSALS = (msgspec.MsgspecError, UnicodeError, RecursionError)
# Of a time that an element does not have.
ABSENT_US = -1.0

# ``args``: the correlation, and as JSON what diagnosis may read beside it. That is mostly the same
# for many events, so it is decoded once.
_NAMES = {f"argument_{n}": key for n, key in enumerate(dict.fromkeys(chain(*ARGUMENTS.values())))}
_ABSENT = msgspec.Raw()
RawArguments: Any = msgspec.defstruct(
    "RawArguments",
    [("correlation", Any, None), *((name, msgspec.Raw, _ABSENT) for name in _NAMES)],
    rename=_NAMES,
    gc=False,
    omit_defaults=True,
)
arguments_json = msgspec.json.Encoder().encode


class RawEvent(msgspec.Struct, gc=False):
    """Members of an element; ``ts`` and ``dur`` are in µs."""

    ph: Any = None
    cat: str | None = None
    name: Any = None
    ts: float = ABSENT_US
    dur: float = ABSENT_US
    pid: Any = None
    tid: Any = None
    args: RawArguments | None = None


_ELEMENTS = msgspec.json.Decoder(list[RawEvent])


def decode_elements(text: str) -> list[Any]:
    """A list's RawEvents, or its elements as the standard library reads them. Raises ValueError."""
    try:
        return _ELEMENTS.decode(text)
    except _REFUSALS:
        elements: list[Any] = decode_json(text)
        return elements


def decode_value(text: bytes) -> Any:
    """None for what is beyond the decoders' limits."""
    try:
        return msgspec.json.decode(text)
    except _REFUSALS:
        pass
    try:
        return decode_json(str(text, "utf-8"))
    except (ValueError, RecursionError):
        return None


# Names of templates reach 6,000 characters; the part that shows a kernel's class comes first.
# Patterns take up to the square of it.
MAX_NAME_CHARS = 2_000
# Distinct names and threads; real traces have some thousands.
MAX_NAMES_BYTES = 64 << 20
# Distinct arguments, as bytes of `marshal`; real traces with stacks have some megabytes. Their JSON
# is kept up to the same size: most events' arguments are found by it without being decoded.
MAX_ARGUMENTS_BYTES = 64 << 20
# Python frames give source lines; beyond this many, lines stay unknown.
MAX_FRAMES = 1_000_000
# 30,000 years: profilers with a lost clock write negative, absent or absurd times.
MAX_TIME_US = 1e18
# What one entry of a dict and its objects take beside their text.
_ENTRY_BYTES = 200
_MAX_ID = 1 << 64
# Numbers as arguments fit into 64 bits with a sign, so that sums and products stay finite.
MAX_NUMBER = 1 << 63
_NUMBERS = frozenset({int, float})
# Annotations that old traces list as operators.
_ANNOTATION = re.compile(
    r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.|DistributedDataParallel\."
)
# Nine in ten frames are neither the user's code nor an activity that diagnosis looks for.
_UNUSED_FRAME = re.compile(
    r"nn\.Module: |<built-in (?!.*\bcollect\b)|<frozen |<string>|<eval_with_key>"
    r"|(.*(site|dist)-packages/)?torch/(nn|autograd|optim|amp|fx|cuda|profiler|utils/data)/"
    r"|(.*(site|dist)-packages/)?torch/(_ops|_tensor|_jit_internal|functional|overrides)\.py"
    r"|(.*lib/python3\.\d+/)?(threading|contextlib|runpy|typing|enum)\.py\("
)


class TraceEvent(NamedTuple):
    """Something with a duration, or an instant. ``correlation``: joins a launch and its kernel.

    ``arguments``: those of its ``args`` that ARGUMENTS lists, None without any; equal ones are one
    object.
    """

    name: str
    begin_us: float
    end_us: float
    thread: str
    correlation: int | None
    arguments: Mapping[str, Any] | None = None

    def number(self, key: str) -> float | None:
        """An argument as a not negative number."""
        value: Any = self.arguments.get(key) if self.arguments else None
        return float(value) if type(value) in _NUMBERS and 0 <= value < MAX_NUMBER else None

    def whole(self, key: str) -> int | None:
        """An argument as a not negative whole number."""
        value: Any = self.arguments.get(key) if self.arguments else None
        return value if type(value) is int and value >= 0 else None


BEGIN = itemgetter(TraceEvent._fields.index("begin_us"))


def by_begin(events: Iterable[TraceEvent], then: Callable[[TraceEvent], Any]) -> list[TraceEvent]:
    """Sorted by their begin; ``then`` orders events of one instant, and is seldom needed."""
    ordered = sorted(events, key=BEGIN)
    begins = list(map(BEGIN, ordered))
    if any(map(eq, begins, islice(begins, 1, None))):
        ordered.sort(key=lambda event: (event.begin_us, then(event)))
    return ordered


def inside(events: Iterable[TraceEvent], window: tuple[float, float]) -> list[TraceEvent]:
    """Those that overlap the window, in µs."""
    low, high = window
    return [e for e in events if e.begin_us < high and e.end_us > low]


def spans(events: Iterable[TraceEvent]) -> list[tuple[float, float]]:
    return [(e.begin_us, e.end_us) for e in events]


class Collector:
    """Takes elements and keeps what diagnosis needs of them in ``events``."""

    def __init__(self, path: object, events: Mapping[Kind, list[TraceEvent]]) -> None:
        self._path = path
        self._events = events
        self._names: dict[str, str] = {}
        self._annotations: set[str] = set()
        self._unused_frames: set[str] = set()
        self._threads: dict[tuple[Any, Any], str] = {}
        self._names_bytes = 0
        self._arguments: dict[bytes, dict[str, Any]] = {}
        self._arguments_bytes = 0
        self._texts: dict[Kind, dict[bytes, Mapping[str, Any] | None]] = defaultdict(dict)
        self._texts_bytes = 0

    def take(self, elements: list[Any]) -> None:
        """RawEvents, or any JSON. Raises TraceError when there are too many distinct names."""
        for element in elements:
            try:
                if type(element) is RawEvent:
                    self._keep(element)
                elif isinstance(element, dict):
                    self._keep(_raw(element))
            except TypeError:  # a list where a category, a name or a thread should be
                continue

    def _keep(self, raw: RawEvent) -> None:
        name = raw.name
        begin_us, took_us = raw.ts, raw.dur
        kind: Kind | None
        if raw.ph == "X":
            kind = KINDS.get(raw.cat or "")
        elif raw.ph == "i" and name == MEMORY_NAME:
            kind, took_us = "memory", 0.0
        else:
            return
        if kind is None or not 0 < begin_us < MAX_TIME_US or not 0 <= took_us < MAX_TIME_US:
            return
        name = self._names.get(name) or self._name(name)
        if kind == "operator" and name in self._annotations:
            kind = "annotation"
        elif kind == "python" and not self._uses(name):
            return
        thread = self._threads.get((raw.pid, raw.tid)) or self._thread(raw.pid, raw.tid)
        given: Any = raw.args
        correlation = arguments = None
        if type(given) is RawArguments:
            correlation = _correlation(given.correlation)
            arguments = self._arguments_of(kind, given) if kind in ARGUMENTS else None
        elif isinstance(given, dict):
            correlation, arguments = _correlation(given.get("correlation")), self._pick(kind, given)
        end_us = begin_us + took_us
        self._events[kind].append(
            TraceEvent(name, begin_us, end_us, thread, correlation, arguments)
        )

    def _name(self, name: Any) -> str:
        if not isinstance(name, str):
            raise TypeError
        if len(name) > MAX_NAME_CHARS:
            name = name[:MAX_NAME_CHARS]
        if name not in self._names:
            self._spend(name)
            self._names[name] = name
            if _ANNOTATION.match(name):
                self._annotations.add(name)
            if _UNUSED_FRAME.match(name):
                self._unused_frames.add(name)
        return self._names[name]

    def _uses(self, frame: str) -> bool:
        return frame not in self._unused_frames and len(self._events["python"]) < MAX_FRAMES

    def _thread(self, process: Any, number: Any) -> str:
        """``process/thread``, of GPU events ``device/stream``."""
        thread = f"{process}/{number}"
        self._spend(thread)
        self._threads[process, number] = thread = self._names.setdefault(thread, thread)
        return thread

    def _spend(self, text: str) -> None:
        self._names_bytes += _ENTRY_BYTES + 2 * len(text)
        if self._names_bytes > MAX_NAMES_BYTES:
            count = len(self._names) + len(self._threads)
            raise TraceError(f"{self._path}: more than {count:,} different names and threads")

    def _arguments_of(self, kind: Kind, given: Any) -> Mapping[str, Any] | None:
        # Each launch has its own; without it, many events share one encoded text.
        given.correlation = None
        content = arguments_json(given)
        known = self._texts[kind]
        return known[content] if content in known else self._learn(kind, content)

    def _learn(self, kind: Kind, content: bytes) -> Mapping[str, Any] | None:
        given = decode_value(content)
        arguments = self._pick(kind, given) if isinstance(given, dict) else None
        # Totals of memory are hardly ever equal.
        if kind != "memory" and self._texts_bytes < MAX_ARGUMENTS_BYTES:
            self._texts_bytes += _ENTRY_BYTES + len(content)
            self._texts[kind][content] = arguments
        return arguments

    def _pick(self, kind: Kind, given: dict[str, Any]) -> Mapping[str, Any] | None:
        """What diagnosis reads of ``args``; equal ones are one object."""
        picked = {key: given[key] for key in ARGUMENTS.get(kind, ()) if key in given}
        if _makes_one_gradient(picked.pop(CONCRETE, None)):
            picked[ONE_GRADIENT] = True
        if not picked:
            return None
        if kind == "memory":
            return {k: v for k, v in picked.items() if type(v) is int and abs(v) < _MAX_ID}
        try:
            content = marshal.dumps(picked, 2)
        except ValueError:  # nested too deeply
            return None
        known = self._arguments.get(content)
        if known is None and self._arguments_bytes < MAX_ARGUMENTS_BYTES:
            self._arguments_bytes += _ENTRY_BYTES + len(content)
            known = {k: value for k, value in picked.items() if is_bounded(value)}
            self._arguments[content] = known
        return known


def _makes_one_gradient(concrete: Any) -> bool:
    """The last input of a convolution's backward call: which gradients, of input, weight, bias."""
    last = concrete[-1] if isinstance(concrete, list) and concrete else None
    return isinstance(last, str) and last.startswith(("[False, True,", "[True, False,"))


def _correlation(value: Any) -> int | None:
    """Drivers count from 1; 0 is what a lost correlation is written as."""
    return value if type(value) is int and 0 < value < _MAX_ID else None


def _raw(element: dict[str, Any]) -> RawEvent:
    """Times that are no numbers become absent ones."""
    get = element.get
    begin, took = get("ts"), get("dur")
    return RawEvent(
        ph=get("ph"),
        cat=get("cat"),
        name=get("name"),
        ts=float(begin) if is_time(begin) else ABSENT_US,
        dur=float(took) if is_time(took) else ABSENT_US,
        pid=get("pid"),
        tid=get("tid"),
        args=get("args"),
    )


def is_bounded(value: Any) -> bool:
    """Whether it is not a number, or one that cannot overflow."""
    return type(value) not in _NUMBERS or abs(value) < MAX_NUMBER


def is_time(value: Any) -> TypeGuard[float]:
    """Whether it can be a time or a duration in µs."""
    return type(value) in _NUMBERS and 0 <= value < MAX_TIME_US
