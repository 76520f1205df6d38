"""Provides the words that a report uses for the identifiers of the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from warpwatch_diagnosis.measures.measures import Measures

VERDICTS = {
    "data_loading": "Waiting for data",
    "host_bound": "The CPU cannot keep the GPU busy",
    "launch_bound": "Too many small kernels",
    "sync_bound": "The code keeps waiting for the GPU",
    "transfer_bound": "Copies hold up the GPU",
    "communication_bound": "Communication is not hidden",
    "straggler": "One rank holds up the others",
    "pipeline_bubble": "The pipeline's stages wait for each other",
    "stage_imbalance": "One stage of the pipeline does more than the others",
    "memory_bound": "Limited by memory bandwidth",
    "allocator_thrash": "Memory is allocated over and over",
    "recompilation": "torch.compile compiles again",
    "gc_pause": "Garbage collection pauses the training",
    "checkpoint": "Checkpoints hold up the training",
    "slower_compute": "The GPU computes longer than in the baseline",
    "scheduler_bound": "The scheduler keeps the GPU waiting",
    "prefill_interference": "Prompts hold up the requests that decode",
    "kv_thrash": "The KV cache is too small for the load",
    "waiting_for_work": "Healthy: the server waits for work",
    "healthy": "Healthy",
    "inconclusive": "No clear answer",
}
# The titles for traces without a GPU.
_ON_CPU = {
    "host_bound": "Python between the operators takes the time",
    "sync_bound": "Values are read one by one",
    "slower_compute": "Operators take longer than in the baseline",
    "scheduler_bound": "The scheduler keeps the workers waiting",
}
# The titles for inference servers.
_OF_SERVERS = {
    "gc_pause": "Garbage collection pauses the server",
    "checkpoint": "Writing a file holds up the server",
    "sync_bound": "The server keeps waiting for the GPU",
}
# The disjoint parts of a step in the order in which they are stacked (work, communication, losses),
# their titles, and their heads of columns on a terminal.
_PARTS = {
    "compute": ("Compute", "compute"),
    "operators": ("Operators", "operators"),
    "communication": ("Communication not hidden", "comm."),
    "rank_wait": ("Waiting for other ranks", "waiting"),
    "copies": ("Copies not hidden", "copies"),
    "data_loading": ("Waiting for data", "data"),
    "host": ("Python between operators", "python"),
    "dispatch": ("Operator overhead", "op. cost"),
    "launch": ("Launch overhead", "launch"),
    "synchronization": ("Code waited for the GPU", "sync"),
    "copy": ("Code waited for a copy", "copy wait"),
    "blocked": ("Blocked in a collective", "blocked"),
    "allocator": ("Allocator", "allocator"),
    "gc": ("Garbage collection", "gc"),
    "compile": ("torch.compile", "compile"),
    "checkpoint": ("Checkpoint", "checkp."),
    "kernel_gap": ("Between kernels", "gaps"),
    "scheduler": ("Waiting for the scheduler", "scheduler"),
    "waiting_for_work": ("Waiting for work", "no work"),
    "unexplained": ("Unexplained", "unknown"),
}
PARTS = {part: title for part, (title, _) in _PARTS.items()}
COLUMN_HEADS = {part: head for part, (_, head) in _PARTS.items()}
# The titles of spans in a timeline's lanes.
LANES = {
    "matrix": "Matrix products",
    "other_kernel": "Other kernels",
    "collective": "Collectives",
    "transfer": "Copies",
    "operator": "Operators",
    **PARTS,
}
_MAX_TEXT = 2_000
_MAX_DEVICE = 100
_MATRIX = frozenset({"gemm", "convolution", "attention"})
_COPIES = frozenset({"HtoD", "DtoH", "DtoD", "PtoP", "HtoH", "memset"})


def title(kind: str, capture: Sequence[Measures]) -> str:
    """Return the title of a verdict or finding in a report of these traces."""
    on_cpu = all(measures.gpu is None for measures in capture)
    serves = any(measures.server is not None for measures in capture)
    other = (serves and _OF_SERVERS.get(kind)) or (on_cpu and _ON_CPU.get(kind))
    return other or VERDICTS[kind]


def stream_label(label: str) -> str:
    """Return the label that colours a kernel's class or a copy's direction."""
    if label in _MATRIX:
        return "matrix"
    if label == "communication":
        return "collective"
    return "transfer" if label in _COPIES else "other_kernel"


def printable(text: str) -> str:
    """Replace the characters of a trace that a terminal would obey or a file cannot hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def origin(measures: Measures) -> str:
    """Return one line that identifies the trace."""
    parts = [measures.file]
    if measures.rank is not None:
        parts.append(f"rank {measures.rank}")
    parts.append(
        (measures.device_name or "")[:_MAX_DEVICE] or ("GPU" if measures.gpu else "CPU only")
    )
    steps = len(measures.steps)
    parts.append(f"{steps} step{'' if steps == 1 else 's'}" if steps else "no steps annotated")
    parts.append(f"{measures.window_s:.3f} s")
    return ", ".join(printable(part) for part in parts)


def safe(text: str) -> str:
    """Escape text for HTML and its attributes, and cut it where no sentence of ours ends."""
    return escape(printable(text[:_MAX_TEXT]))


def sentence(text: str) -> str:
    """Add a full stop, and a capital unless the text begins with a name of the trace."""
    first = text.partition(" ")[0]
    if first.isalpha():
        text = text[:1].upper() + text[1:]
    end = "" if text[-1:] in (".", "!", "?", "…") else "."
    return text + end


def duration(us: float) -> str:
    """Return a duration in the unit that fits."""
    if not us:
        return "0"
    if us >= 1e6:
        return f"{us / 1e6:,.2f} s"
    if us >= 1e3:
        return f"{us / 1e3:,.1f} ms"
    return f"{us:,.0f} µs"


def size(count: float | None) -> str:
    """Return bytes in decimal units, as bandwidths have them."""
    if count is None:
        return "-"
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= limit:
            return f"{count / limit:,.1f} {unit}"
    return f"{count:,.0f} B"


def short(name: str | None, limit: int = 60) -> str:
    """Return the start of a name from the trace: templates of kernels grow to many kB."""
    name = name or ""
    return name if len(name) <= limit else name[: limit - 1] + "…"


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Return ``a, b and 3 more``."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def milliseconds(us: float) -> str:
    return f"{us / 1e3:,.1f} ms"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
