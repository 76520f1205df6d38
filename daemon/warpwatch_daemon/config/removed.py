"""Keys of earlier versions: refused, with what became of them."""

from __future__ import annotations

_CONSTANT = "was removed: it only tuned the mechanism; the value that was its default is built in"

_REMOVED = {
    "detectors": "is called detection now",
    "anomalies.max_history": _CONSTANT,
    "rendezvous.poll_interval_s": _CONSTANT,
    "triggers.capture_timeout_s": _CONSTANT,
    "triggers.other_capture_s": _CONSTANT,
}
_REMOVED_OF_RECIPES = {
    "options_on_repeat": "was removed: a repeated capture of kind torch records stacks besides",
}


def what_became(path: str) -> str | None:
    """One line on the key at ``path``; None where there never was such a key."""
    section, _, leaf = path.rpartition(".")
    text = _REMOVED.get(path)
    if section.startswith("triggers.recipes."):
        text = _REMOVED_OF_RECIPES.get(leaf)
    return None if text is None else f"{path}: {text}"
