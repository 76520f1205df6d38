"""The report's colours, light and dark, and its style sheet, style.css.

Contrast of text is at least 4.5 to 1 in both colour schemes.
"""

from __future__ import annotations

from pathlib import Path

# By part: light, dark. What the step is for is blue, company violet, copies teal, losses warm.
COLOURS = {
    "compute": ("#2f6fde", "#4d8bf0"),
    "operators": ("#2f6fde", "#4d8bf0"),
    "matrix": ("#1f57bd", "#3f7de8"),
    "other_kernel": ("#7fabf2", "#8fb8f7"),
    "operator": ("#94a3b8", "#7b8ba5"),
    "collective": ("#8250df", "#a47af0"),
    "communication": ("#8250df", "#a47af0"),
    "rank_wait": ("#d63d8f", "#f06eb0"),
    "copies": ("#0f8f86", "#2bb8ad"),
    "transfer": ("#0f8f86", "#2bb8ad"),
    "data_loading": ("#e8590c", "#ff8a3d"),
    "host": ("#cf222e", "#ff6b63"),
    "dispatch": ("#e0a100", "#e9bd3f"),
    "launch": ("#f5cf47", "#ffe27a"),
    "synchronization": ("#a3195b", "#e0559a"),
    "copy": ("#3aa69b", "#6fd0c7"),
    "blocked": ("#b08cf0", "#c9b0f7"),
    "allocator": ("#8c5a2b", "#c08a55"),
    "gc": ("#4d7c0f", "#8fc043"),
    "compile": ("#0891b2", "#4cc4e0"),
    "checkpoint": ("#6b7a00", "#b9c94a"),
    "kernel_gap": ("#c3cad4", "#4a5361"),
    "unexplained": ("#8b95a3", "#7d8794"),
}
_LIGHT = (
    "--ink:#1a2029;--soft:#57606d;--page:#f5f6f8;--card:#fff;--line:#e0e4ea;--track:#edf0f4;"
    "--good:#17663d;--good-soft:#e3f4ea;--bad:#a51d2b;--bad-soft:#fdeced;--open:#7a4a00;"
    "--open-soft:#fcf1da;"
)
_DARK = (
    "--ink:#e6eaf0;--soft:#a3adbb;--page:#0e1116;--card:#171b22;--line:#2b323d;--track:#222832;"
    "--good:#6fd69c;--good-soft:#14301f;--bad:#ff9a9f;--bad-soft:#37191d;--open:#f0bb63;"
    "--open-soft:#33270f;"
)
_RULES = Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def _variables(scheme: int) -> str:
    return "".join(f"--p-{label}:{both[scheme]};" for label, both in COLOURS.items())


def _fills() -> str:
    return "".join(
        f".p-{label}{{fill:var(--p-{label})}}.b-{label}{{background:var(--p-{label})}}"
        for label in COLOURS
    )


STYLE = (
    f":root{{{_LIGHT}{_variables(0)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK}{_variables(1)}}}}}"
    f"\n{_RULES}{_fills()}"
)
