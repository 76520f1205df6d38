"""Positions and counts that survive a restart of the daemon, in the rendezvous folder itself.

The file lives as long as the rings do. Position and counts are saved together, so a daemon that
is killed at any time reads again what it had read after the last save and counts it once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from warpwatch_daemon.ranks.rank import Rank

logger = logging.getLogger(__name__)

FILE = "positions.json"
VERSION = 1


# A ring by the pod whose folder it lies in, None in the folder of all, and its name.
Key = tuple[str | None, str]


def load(folder: Path) -> dict[Key, dict[str, Any]]:
    """What was saved, by ring; empty when there is nothing usable."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        # A version before this one knew no pods.
        return {(entry.get("pod"), str(entry["ring"])): entry for entry in content["ranks"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("cannot use %s, counts start again: %s", folder / FILE, error)
        return {}


def save(folder: Path, ranks: Iterable[Rank], unclaimed: Iterable[dict[str, Any]] = ()) -> None:
    """Raises OSError when the folder is full; the file before stays whole.

    ``unclaimed``: what was loaded of rings that were not looked at yet.
    """
    content = {"version": VERSION, "ranks": [*(rank.save() for rank in ranks), *unclaimed]}
    part = folder / (FILE + ".part")
    part.write_text(json.dumps(content, separators=(",", ":")))
    os.replace(part, folder / FILE)
