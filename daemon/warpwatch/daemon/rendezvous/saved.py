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

from warpwatch.daemon.rendezvous.rank import Rank

logger = logging.getLogger(__name__)

FILE = "positions.json"
VERSION = 1


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """What was saved, by ring name; empty when there is nothing usable."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        return {str(entry["ring"]): entry for entry in content["ranks"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cannot use %s, counts start anew: %s", folder / FILE, error)
        return {}


def save(folder: Path, ranks: Iterable[Rank]) -> None:
    """Raises OSError when the folder is full; the file before stays whole."""
    content = {"version": VERSION, "ranks": [rank.save() for rank in ranks]}
    part = folder / (FILE + ".part")
    part.write_text(json.dumps(content, separators=(",", ":")))
    os.replace(part, folder / FILE)
