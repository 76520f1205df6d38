"""A web server that Prometheus scrapes and Alertmanager tells."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.exporters.receiver import Answer, http_server
from warpwatch_daemon.demo.processes import free_port


class Web:
    """Serves pages by path, made when they are asked for, and keeps what is posted, and when."""

    def __init__(self, pages: Mapping[str, Callable[[], bytes]]) -> None:
        self.posted: dict[str, list[Any]] = {}
        self.port = free_port()
        self._pages = pages

    @contextmanager
    def serving(self) -> Iterator[Web]:
        with http_server(self._answer, port=self.port):
            yield self

    def _answer(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        if method == "GET":
            return 200, {}, self._pages[path]()
        note = json.loads(body) | {"received": time.time()}
        self.posted.setdefault(path, []).append(note)
        return 200, {}, b""
