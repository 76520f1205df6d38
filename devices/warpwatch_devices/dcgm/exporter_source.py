"""A running dcgm-exporter as a source: what it serves, mapped back to our devices and series.

It reads DCGM every 30 s by default, and goes on serving its last values when DCGM is gone. So a
page that is word for word the one before is not published, and the devices go stale.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import socket
import time
import urllib.error
import urllib.request
import zlib
from base64 import b64encode
from collections.abc import Callable
from email.message import Message
from typing import IO
from urllib.parse import unquote, urlsplit, urlunsplit

from warpwatch_devices.config import DcgmExporterConfig
from warpwatch_devices.dcgm.devices import PublishedDevices, device_of
from warpwatch_devices.dcgm.scrape import Scrape, read
from warpwatch_devices.source import Sink, Source, Surroundings
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.samples import DeviceSample, SourceHealth

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
TIMEOUT_S = 5.0
MAX_BODY_BYTES = 16 * 2**20

_CHUNK_BYTES = 65_536
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_MAX_REASON_CHARACTERS = 200


class ScrapeFailed(Exception):
    """The exporter's answer cannot be used; the text says why in one line."""


class DcgmExporterSource(Source):
    """Of several hosts this one is NODE_NAME of the environment, else the system's name."""

    name = "dcgm_exporter"

    def __init__(
        self,
        config: DcgmExporterConfig,
        surroundings: Surroundings,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._url = config.url or ""
        self._surroundings = surroundings
        self._hostname = os.environ.get("NODE_NAME") or socket.gethostname()
        self._published = PublishedDevices(self.name)
        self._last_digest = b""
        self._errors = 0
        self._reason = ""

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        supervisor.every(self.name, INTERVAL_S, lambda: self._read(sink))

    def _read(self, sink: Sink) -> None:
        begun = self._monotonic()
        reason = ""
        try:
            self._scrape(sink)
        except ScrapeFailed as failure:
            self._errors += 1
            reason = f"dcgm-exporter at {_server(self._url)}: {failure}"
        if reason and reason != self._reason:
            logger.warning("%s", reason)
        self._reason = reason
        duration_s = self._monotonic() - begun
        sink.publish_health(SourceHealth(self.name, not reason, reason, duration_s, self._errors))

    def _scrape(self, sink: Sink) -> None:
        now = self._wall()
        body = fetch(self._url, TIMEOUT_S, self._monotonic)
        digest = hashlib.blake2b(body).digest()
        if digest == self._last_digest:
            return
        scrape = read(body.decode("utf-8", "replace"), self._hostname)
        self._errors += scrape.rejected
        if not scrape.devices:
            raise ScrapeFailed(self._nothing_in(scrape))
        self._published.publish(self._samples(scrape, now), sink)
        self._last_digest = digest

    def _samples(self, scrape: Scrape, now: float) -> list[DeviceSample]:
        known = self._surroundings.devices()
        return [
            DeviceSample(device, now, scraped.values, source=self.name)
            for scraped in scrape.devices
            if (device := device_of(scraped.device, known)) is not None
        ]

    def _nothing_in(self, scrape: Scrape) -> str:
        if len(scrape.hosts) > 1:
            some = ", ".join(scrape.hosts[:3])
            return f"it serves {len(scrape.hosts)} hosts ({some}, …) but not {self._hostname}"
        return "it answers, but without values of a GPU; is the address right?"


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Follows a redirection only where it stays on the same server."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            fp.close()
            raise ScrapeFailed("it redirects to another server, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


# Never through a proxy: the exporter runs on this very host.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _SameServer)


def fetch(url: str, timeout_s: float, monotonic: Callable[[], float] = time.monotonic) -> bytes:
    """The body, at most MAX_BODY_BYTES, also after decompression. Raises ScrapeFailed."""
    request = _request(url)
    deadline = monotonic() + timeout_s
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            body = _read_body(response, deadline, monotonic)
            encoding = response.headers.get("Content-Encoding", "identity")
        return _decode(body, encoding.lower())
    except urllib.error.HTTPError as error:
        error.close()
        raise ScrapeFailed(f"it answers {error.code}") from error
    except TimeoutError as error:
        raise ScrapeFailed(f"no answer within {timeout_s:g} s") from error
    except urllib.error.URLError as error:
        raise ScrapeFailed(_explain(error.reason, timeout_s)) from error
    except (OSError, http.client.HTTPException, ValueError, zlib.error) as error:
        raise ScrapeFailed(_one_line(error)) from error


def _request(url: str) -> urllib.request.Request:
    """A name and a password in the URL become basic authentication."""
    parts = urlsplit(url)
    server = _server(url)
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=server)))
    request.add_header("Accept", "text/plain")
    request.add_header("Accept-Encoding", "gzip")
    if parts.username is not None:
        who = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request.add_header("Authorization", f"Basic {b64encode(who.encode()).decode()}")
    return request


def _server(url: str) -> str:
    """Host and port, without credentials: for people to read."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _read_body(
    response: http.client.HTTPResponse, deadline: float, monotonic: Callable[[], float]
) -> bytes:
    """Until its end, whoever drips it byte by byte."""
    body = bytearray()
    while chunk := response.read1(_CHUNK_BYTES):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ScrapeFailed(f"its answer is longer than {MAX_BODY_BYTES} bytes")
        if monotonic() > deadline:
            raise TimeoutError
    if response.length:
        raise ScrapeFailed("its answer is cut short")
    return bytes(body)


def _decode(body: bytes, encoding: str) -> bytes:
    if encoding == "identity":
        return body
    if encoding != "gzip":
        raise ScrapeFailed(f"it answers in the encoding {encoding[:20]!r}, which was not asked for")
    inflater = zlib.decompressobj(_GZIP_WINDOW)
    text = inflater.decompress(body, MAX_BODY_BYTES)
    if inflater.unconsumed_tail:
        raise ScrapeFailed(f"its answer is longer than {MAX_BODY_BYTES} bytes")
    if not inflater.eof:
        raise ScrapeFailed("its answer is cut short")
    return text


def _explain(reason: object, timeout_s: float) -> str:
    if isinstance(reason, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(reason, ConnectionRefusedError):
        return "nothing listens there; is dcgm-exporter running?"
    return _one_line(reason)


def _one_line(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_MAX_REASON_CHARACTERS]
