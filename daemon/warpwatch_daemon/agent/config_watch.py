"""Whether the configuration's file has got another content.

A ConfigMap's file is exchanged in place, a while after the ConfigMap was changed, and nothing sends
SIGHUP. Contents are compared, not times: the kubelet swaps a link above the file.
"""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

# The kubelet brings a change within a minute or so; this adds little to it.
WATCH_INTERVAL_S = 10.0


class ConfigWatch:
    """Made before the file is loaded, so that no change falls between the two."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = self._read()

    def changed(self) -> bool:
        """Since it was asked last. A file that is away for a moment has not changed."""
        content = self._read()
        if content is None or content == self._content:
            return False
        self._content = content
        logger.info("%s has changed", self._path)
        return True

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None
