"""Turns elements of a trace's JSON into TraceEvents, or ignores them.

Events share equal names, threads and arguments, so that an event takes about 200 bytes. All of
these are bounded.

msgspec decodes only the members that diagnosis reads. Text that it refuses although it may be a
trace's (``NaN``, raw control characters, lone surrogates, members of another type) goes to the
standard library's decoder.
"""

from __future__ import annotations

import marshal
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from operator import eq, itemgetter
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar

import msgspec
from msgspec import Raw, field

from warpwatch_diagnosis.trace.files import TraceError, decode_json

Kind = Literal["operator", "annotation", "runtime", "kernel", "copy", "python", "memory"]

_COLLECTIVE_ARGUMENTS = (
    "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size",
    "Process Group Name", "Seq",
)  # fmt: skip

# The profiler's categories from 2022 on (lower case) and before (capitalised).
_CATEGORIES: dict[Kind, tuple[str, ...]] = {
    "operator": ("cpu_op", "Operator"),
    "annotation": ("user_annotation",),
    "runtime": (
        "cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "mtia_runtime",
        "privateuse1_runtime", "privateuse1_driver", "Runtime",
    ),
    "kernel": ("kernel", "Kernel"),
    "copy": ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"),
    "python": ("python_function",),
}  # fmt: skip
KINDS = {category: kind for kind, names in _CATEGORIES.items() for category in names}
# The events of this name are instants; PyTorch before 1.12 gives them no category.
MEMORY_NAME = "[memory]"
CONCRETE = "Concrete Inputs"
# The one fact that is kept of CONCRETE: a convolution's backward call makes the gradient of only
# its input or only its weight.
ONE_GRADIENT = "One gradient"
# The arguments that are kept of an event's ``args``.
ARGUMENTS: dict[Kind, tuple[str, ...]] = {
    "operator": ("Input Dims", "Input type", "Call stack", CONCRETE, *_COLLECTIVE_ARGUMENTS),
    "kernel": (
        "device", "grid", "blocks per SM", "est. achieved occupancy %", *_COLLECTIVE_ARGUMENTS,
    ),
    "copy": ("device", "bytes"),
    "memory": ("Device Type", "Device Id", "Bytes", "Total Allocated", "Total Reserved"),
}  # fmt: skip
# Names of templates reach 6,000 characters, and patterns take up to the square of the length. The
# part that shows a kernel's class comes first.
MAX_NAME_CHARS = 2_000
# Real traces have a few thousand distinct names and threads.
MAX_NAMES_BYTES = 64 << 20
# The limit on distinct arguments, as bytes of `marshal`; real traces with stacks have a few MB.
# Their JSON has the same limit: most arguments are found by it without being decoded.
MAX_ARGUMENTS_BYTES = 64 << 20
# Python frames give source lines; beyond this many, lines stay unknown.
MAX_FRAMES = 1_000_000
# 30,000 years: profilers with a lost clock write negative, absent or absurd times.
MAX_TIME_US = 1e18
# The cost of one entry of a dict and its objects beside their text.
_ENTRY_BYTES = 200
_MAX_ID = 1 << 64
# Numbers as arguments fit into 64 bits with a sign, so that sums and products stay finite.
MAX_NUMBER = 1 << 63
_NUMBERS = frozenset({int, float})
# Old traces list these annotations as operators.
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
    """A span or an instant of a thread. ``correlation`` joins a launch and its kernel.

    ``arguments``: the ``args`` that ARGUMENTS lists, or None; equal ones are one object.
    """

    name: str
    begin_us: float
    end_us: float
    thread: str
    correlation: int | None
    arguments: Mapping[str, Any] | None = None

    def number(self, key: str) -> float | None:
        """Return an argument as a number of at least 0, or None."""
        value: Any = self.arguments.get(key) if self.arguments else None
        return float(value) if type(value) in _NUMBERS and 0 <= value < MAX_NUMBER else None

    def whole(self, key: str) -> int | None:
        """Return an argument as a whole number of at least 0, or None."""
        value: Any = self.arguments.get(key) if self.arguments else None
        return value if type(value) is int and value >= 0 else None


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
# The calls of the runtime by their correlation.
RuntimeCalls = Mapping[int | None, TraceEvent]
BEGIN, THREAD = map(itemgetter, map(TraceEvent._fields.index, ("begin_us", "thread")))


def by_begin(events: Iterable[TraceEvent], then: Callable[[TraceEvent], Any]) -> list[TraceEvent]:
    """Sort by begin; ``then`` orders events of one instant, and is seldom needed."""
    ordered = sorted(events, key=BEGIN)
    begins = list(map(BEGIN, ordered))
    if any(map(eq, begins, islice(begins, 1, None))):
        ordered.sort(key=lambda event: (event.begin_us, then(event)))
    return ordered


def grouped(values: Iterable[_Value], key: Callable[[_Value], _Key]) -> dict[_Key, list[_Value]]:
    """Return the values by their key, those of a key in order."""
    groups: dict[_Key, list[_Value]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def outermost(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the outermost events of each thread, by begin."""
    kept: list[TraceEvent] = []
    reached: dict[str, float] = {}
    for event in by_begin(events, lambda e: (-e.end_us, e.name, e.thread)):
        # By rounding, an event may begin before the end of the one before it.
        if event.end_us > reached.get(event.thread, event.begin_us - 1):
            kept.append(event)
            reached[event.thread] = event.end_us
    return kept


def inside(events: Iterable[TraceEvent], window: tuple[float, float]) -> list[TraceEvent]:
    """Return the events that overlap the window, in µs."""
    low, high = window
    return [e for e in events if e.begin_us < high and e.end_us > low]


def spans(events: Iterable[TraceEvent]) -> list[tuple[float, float]]:
    return [(e.begin_us, e.end_us) for e in events]


_REFUSALS = (msgspec.MsgspecError, UnicodeError, RecursionError)
# The time of an element that has none.
ABSENT_US = -1.0
_ABSENT = Raw()


# The ``args`` of an element: the correlation, and as JSON every argument of ARGUMENTS. Many events
# have the same JSON, so each distinct one is decoded only once.
RawArguments: Any = msgspec.defstruct(
    "RawArguments",
    [
        ("correlation", Any, None),
        *(
            (f"argument_{number}", Raw, field(default=_ABSENT, name=name))
            for number, name in enumerate(dict.fromkeys(chain(*ARGUMENTS.values())))
        ),
    ],
    gc=False,
    omit_defaults=True,
)


class RawEvent(msgspec.Struct, gc=False):
    """The members of an element; ``ts`` and ``dur`` are in µs."""

    ph: Any = None
    cat: str | None = None
    name: Any = None
    ts: float = ABSENT_US
    dur: float = ABSENT_US
    pid: Any = None
    tid: Any = None
    args: RawArguments | None = None


_ELEMENTS = msgspec.json.Decoder(list[RawEvent])
_arguments_json = msgspec.json.Encoder().encode


def decode_elements(text: str) -> list[Any]:
    """Return a list's RawEvents, or its elements as the standard library decodes them.

    Raises ValueError.
    """
    try:
        return _ELEMENTS.decode(text)
    except _REFUSALS:
        elements: list[Any] = decode_json(text)
        return elements


def _decode_value(text: bytes) -> Any:
    """Return the value, or None if it is beyond the decoders' limits."""
    try:
        return msgspec.json.decode(text)
    except _REFUSALS:
        pass
    try:
        return decode_json(str(text, "utf-8"))
    except (ValueError, RecursionError):
        return None


class Collector:
    """Adds the events that diagnosis needs to ``events``."""

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

    def add(self, elements: list[Any]) -> None:
        """Add RawEvents, or any JSON. Raises TraceError if there are too many distinct names."""
        for element in elements:
            try:
                if type(element) is RawEvent:
                    self._keep(element)
                elif isinstance(element, dict):
                    self._keep(_raw(element))
            except TypeError:
                # The element has a list in place of a category, a name or a thread.
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
        elif kind == "python" and (
            name in self._unused_frames or len(self._events["python"]) >= MAX_FRAMES
        ):
            return
        thread = self._threads.get((raw.pid, raw.tid)) or self._thread(raw.pid, raw.tid)
        given: Any = raw.args
        correlation = arguments = None
        if type(given) is RawArguments:
            correlation = _correlation(given.correlation)
            if kind in ARGUMENTS:
                # Without the correlation, which differs, many events share one encoded text.
                given.correlation = None
                content, known = _arguments_json(given), self._texts[kind]
                arguments = known[content] if content in known else self._learn(kind, content)
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

    def _thread(self, process: Any, number: Any) -> str:
        """Return ``process/thread``, for GPU events ``device/stream``."""
        thread = f"{process}/{number}"
        self._spend(thread)
        self._threads[process, number] = thread = self._names.setdefault(thread, thread)
        return thread

    def _spend(self, text: str) -> None:
        self._names_bytes += _ENTRY_BYTES + 2 * len(text)
        if self._names_bytes > MAX_NAMES_BYTES:
            count = len(self._names) + len(self._threads)
            raise TraceError(f"{self._path}: more than {count:,} different names and threads")

    def _learn(self, kind: Kind, content: bytes) -> Mapping[str, Any] | None:
        given = _decode_value(content)
        arguments = self._pick(kind, given) if isinstance(given, dict) else None
        # Totals of memory are hardly ever equal, so that keeping their text saves nothing.
        if kind != "memory" and self._texts_bytes < MAX_ARGUMENTS_BYTES:
            self._texts_bytes += _ENTRY_BYTES + len(content)
            self._texts[kind][content] = arguments
        return arguments

    def _pick(self, kind: Kind, given: dict[str, Any]) -> Mapping[str, Any] | None:
        """Return the arguments of ARGUMENTS; equal ones are one object."""
        picked = {key: given[key] for key in ARGUMENTS.get(kind, ()) if key in given}
        # The last input of a convolution's backward call says which gradients it makes: those of
        # input, weight and bias.
        concrete = picked.pop(CONCRETE, None)
        last = concrete[-1] if isinstance(concrete, list) and concrete else None
        if isinstance(last, str) and last.startswith(("[False, True,", "[True, False,")):
            picked[ONE_GRADIENT] = True
        if not picked:
            return None
        if kind == "memory":
            return {k: v for k, v in picked.items() if type(v) is int and abs(v) < _MAX_ID}
        try:
            content = marshal.dumps(picked, 2)
        except ValueError:
            # The arguments are nested too deeply.
            return None
        known = self._arguments.get(content)
        if known is None and self._arguments_bytes < MAX_ARGUMENTS_BYTES:
            self._arguments_bytes += _ENTRY_BYTES + len(content)
            known = {k: value for k, value in picked.items() if is_bounded(value)}
            self._arguments[content] = known
        return known


def _correlation(value: Any) -> int | None:
    """Return a correlation, or None. Drivers count from 1 and write a lost correlation as 0."""
    return value if type(value) is int and 0 < value < _MAX_ID else None


def _raw(element: dict[str, Any]) -> RawEvent:
    """Return the element with absent times in place of invalid ones."""
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
    """Return whether a value is not a number, or one that cannot overflow."""
    return type(value) not in _NUMBERS or abs(value) < MAX_NUMBER


def is_time(value: Any) -> TypeGuard[float]:
    """Return whether a value can be a time or a duration in µs."""
    return type(value) in _NUMBERS and 0 <= value < MAX_TIME_US
