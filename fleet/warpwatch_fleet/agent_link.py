"""The connection to one agent: its stream of records, leases, requests, files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx

from warpwatch_fleet.config import AgentsConfig
from warpwatch_fleet.targets import Target
from warpwatch_fleet.transport import Transport
from warpwatch_runtime.bus import Bus, BusError
from warpwatch_serving.access import read_token
from warpwatch_telemetry import clean_text
from warpwatch_telemetry.bus_messages import Publisher, token
from warpwatch_telemetry.captures import OUTCOMES
from warpwatch_telemetry.errors import Refused, UsageError, in_a_line
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
# More at once would wait for each other too long.
MAX_CONNECTING = 256
# An agent sends something twice a second.
SILENCE_S = 10.0
# An agent answers a request within milliseconds.
ANSWER_S = 10.0
# Per agent: 128 ranks at 30 steps per second. An agent that sends more is read no faster, and
# drops lines when its own buffer is full.
MAX_LINES_PER_S = 5000
MAX_BYTES_PER_S = 4 * 2**20
MAX_LINE_BYTES = 2**20
# The duration of a lease, in which the fleet evaluates the job.
LEASE_S = 60.0
_TOKEN = "fleet.agents.token_file"

Lines = Callable[[list[bytes]], None]


class AgentError(Exception):
    """Raised for an agent that cannot be followed or asked; the text is one line."""


class AgentLink(ABC):
    """One agent, as the fleet reaches it. The coroutines are for the loop that follows agents.

    holder: the name of this fleet in leases.
    """

    holder: str

    async def lease(self, job: JobId, raised: Mapping[str, str]) -> None:
        """Tell the agent that the fleet evaluates this job. Raises AgentError, Refused."""
        body = {"holder": self.holder, "seconds": LEASE_S, "raised": dict(raised)}
        await self.request("leases", job.fields() | body)

    @abstractmethod
    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON of the reply. Raises Refused as the agent does, else AgentError."""

    @abstractmethod
    def download(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file; it blocks, so not for the loop. Raises AgentError."""


def _reason(error: httpx.HTTPError) -> str:
    """Return one line; the text of a time-out is only the name of its type."""
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, httpx.TimeoutException):
        return f"it was silent for {SILENCE_S:g} s"
    return in_a_line(error)


def _changed_at(file: Path | None) -> int:
    return 0 if file is None else file.stat().st_mtime_ns


class HttpLinks:
    """The parts that all links share, for one event loop. Raises UsageError for a bad file.

    holder: the name of this fleet in leases.
    """

    def __init__(self, config: AgentsConfig, holder: str) -> None:
        self.holder = holder
        self.connecting = asyncio.Semaphore(MAX_CONNECTING)
        if config.ca_file is not None:
            self.scheme, self.verify = "https", config.context("fleet.agents")
        else:
            # It is not used, but without it each client makes one of its own.
            self.scheme, self.verify = "http", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._config, self._changed_at = config, _changed_at(config.ca_file)
        self._token_files = config.token_files
        for path in self._token_files.values():
            read_token(path, _TOKEN)
        self.client = self.new_client()

    def new_client(self) -> httpx.AsyncClient:
        """Return a client with connections of its own."""
        return httpx.AsyncClient(
            transport=Transport(
                verify=self.verify,
                limits=httpx.Limits(max_keepalive_connections=MAX_CONNECTING),
                trust_env=False,
            ),
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S),
            follow_redirects=False,
            trust_env=False,
        )

    async def renew(self) -> None:
        """Verify new connections by a changed ``ca_file``; keep the old one if that fails."""
        old = self.client
        with contextlib.suppress(OSError, UsageError):
            if (changed_at := _changed_at(self._config.ca_file)) != self._changed_at:
                self.verify, self._changed_at = self._config.context("fleet.agents"), changed_at
                self.client = self.new_client()
                await old.aclose()

    def headers(self, target: Target) -> dict[str, str]:
        """Return the headers of a request; a tenant's own agent is sent its own token at most."""
        # The one encoding that ``_unpacker`` reads.
        headers = {"Accept-Encoding": "gzip"}
        path = self._token_files.get(target.owner)
        if path is None:
            return headers
        try:
            token = read_token(path, _TOKEN).decode()
        except (UsageError, UnicodeDecodeError) as error:
            raise AgentError(str(error)) from error
        return headers | {"Authorization": f"Bearer {token}"}

    def link(self, target: Target) -> HttpLink:
        """Return the link to the agent at this target."""
        return HttpLink(self, target)

    async def close(self) -> None:
        """Close all connections but those that are followed."""
        await self.client.aclose()


class HttpLink(AgentLink):
    """An ``AgentLink`` by HTTP."""

    def __init__(self, agents: HttpLinks, target: Target) -> None:
        self._agents = agents
        self.holder = agents.holder
        self._target = target
        # The certificate of a target that was found by a name is for that name.
        name = target.server_name
        self._extensions = {} if name is None else {"sni_hostname": name}

    def _to(self, path: str) -> dict[str, Any]:
        """Return the arguments of a request for the path."""
        url = f"{self._agents.scheme}://{self._target.address}/api/v1/{path}"
        headers = self._agents.headers(self._target)
        return {"url": url, "headers": headers, "extensions": self._extensions}

    async def follow(self, cursor: str | None, receive: Lines) -> None:
        """Read the stream after ``cursor`` until it ends; ``receive`` gets whole lines.

        Raises AgentError.
        """
        params = {"follow": "true"}
        if cursor is not None:
            params["after"] = cursor
        # A client of its own: what a pool does for a connection takes longer the more it has.
        try:
            async with self._agents.new_client() as client, contextlib.AsyncExitStack() as stack:
                async with self._agents.connecting:
                    asked = client.stream("GET", params=params, **self._to("records"))
                    answer = await stack.enter_async_context(asked)
                if answer.status_code != 200:
                    reply = read_answer(answer.status_code, await _content(answer))
                    raise AgentError(f"{answer.status_code}: {reply}")
                async for lines in _paced(_lines(_parts(answer))):
                    receive(lines)
        except httpx.HTTPError as error:
            raise AgentError(_reason(error)) from error

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            async with (
                self._agents.connecting,
                asyncio.timeout(ANSWER_S),
                self._agents.client.stream("POST", json=body, **self._to(path)) as answer,
            ):
                content = await _content(answer)
        except TimeoutError as error:
            raise AgentError(f"no answer within {ANSWER_S:g} s") from error
        except httpx.HTTPError as error:
            raise AgentError(_reason(error)) from error
        return read_answer(answer.status_code, content)

    def download(self, path: str) -> Iterator[bytes]:
        own = httpx.Client(verify=self._agents.verify, timeout=SILENCE_S, trust_env=False)
        try:
            with own as client, client.stream("GET", **self._to(path)) as answer:
                if answer.status_code != 200:
                    raise AgentError(f"{answer.status_code} for {path}")
                unpack = _unpacker(answer)
                for part in answer.iter_raw():
                    yield from unpack(part)
        except httpx.HTTPError as error:
            raise AgentError(_reason(error)) from error


DOWNLOAD_TIMEOUT_S = 60.0


class BusLinks:
    """The links to agents over one connection, for the event loop ``loop``."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start the work in the loop, from any thread. Raises BusError if the bus is away."""
        if self.loop is None or not self.bus.is_connected:
            raise BusError("the bus is away")
        return asyncio.run_coroutine_threadsafe(work(), self.loop)

    def link(self, target: Target) -> AgentLink:
        publisher = Publisher(target.node or target.address, target.owner)
        return BusLink(self, publisher.requests)


Links = HttpLinks | BusLinks


class BusLink(AgentLink):
    """An ``AgentLink`` over the bus; a file travels as one reply."""

    # All workers are one fleet to an agent.
    holder = "bus"

    def __init__(self, links: BusLinks, subject: str) -> None:
        self._links = links
        self._subject = subject

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        return read_answer(*await self._ask("post", path, json.dumps(body).encode()))

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            subject = f"{self._subject}.{method}.{token(path)}"
            answer = await self._links.bus.request(subject, body)
            return int(answer[:3]), answer[3:]
        except (BusError, ValueError) as error:
            raise AgentError(str(error)) from error

    def download(self, path: str) -> Iterator[bytes]:
        try:
            asked = self._links.run(lambda: self._ask("get", path, b""))
            status, content = asked.result(DOWNLOAD_TIMEOUT_S)
        except BusError as error:
            raise AgentError(str(error)) from error
        except TimeoutError as error:
            asked.cancel()
            raise AgentError(f"no answer within {DOWNLOAD_TIMEOUT_S:g} s") from error
        if status != 200:
            raise AgentError(f"{status} for {path}")
        yield content


def read_answer(status: int, content: bytes) -> Any:
    """Return the JSON of a reply. Raises Refused as the agent does, else AgentError."""
    try:
        reply = clean_text.load(content)
    except ValueError as error:
        raise AgentError(f"{status}: no JSON: {error}") from error
    if status in (200, 202):
        return reply
    try:
        refusal = reply["error"]
        reason, detail = str(refusal["reason"])[:64], str(refusal["detail"])
    except (KeyError, TypeError):
        reason, detail = "", str(reply)
    detail = " ".join(detail.split())[:200]
    if reason in OUTCOMES:
        raise Refused(reason, detail)
    raise AgentError(f"{status}: {detail}")


def _unpacker(answer: httpx.Response) -> Callable[[bytes], Iterator[bytes]]:
    """Return what unpacks a raw part of the answer, in portions of at most MAX_LINE_BYTES.

    Every answer of an agent is read through it: a few bytes can be packed to unpack to gigabytes.
    Raises AgentError for any encoding but one gzip.
    """
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "gzip"):
        raise AgentError(f"content-encoding {encoding[:20]!r} was not asked for")
    unpacker = zlib.decompressobj(wbits=31)

    def unpack(part: bytes) -> Iterator[bytes]:
        while encoding == "gzip" and part:
            try:
                yield unpacker.decompress(part, MAX_LINE_BYTES)
            except zlib.error as error:
                raise AgentError(f"no gzip: {error}") from error
            part = unpacker.unconsumed_tail
        if part:
            yield part

    return unpack


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    unpack = _unpacker(answer)
    async for part in answer.aiter_raw():
        for one in unpack(part):
            yield one


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise AgentError(f"a line is longer than {MAX_LINE_BYTES} bytes")
        if lines:
            yield lines


async def _paced(
    batches: AsyncIterator[list[bytes]],
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[list[bytes]]:
    """Yield lines in portions, at the allowed average rate."""
    allowed_at = monotonic()
    async for lines in batches:
        for begin in range(0, len(lines), MAX_LINES_PER_S // 10):
            portion = lines[begin : begin + MAX_LINES_PER_S // 10]
            yield portion
            now = monotonic()
            # Unused time is saved for 10 s: a new reader catches up with the agent's buffer.
            size = sum(map(len, portion))
            cost_s = max(len(portion) / MAX_LINES_PER_S, size / MAX_BYTES_PER_S)
            allowed_at = max(allowed_at, now - 10.0) + cost_s
            await sleep(max(0.0, allowed_at - now))


async def _content(answer: httpx.Response) -> bytes:
    """Return the body of a reply. Raises AgentError for a longer one than agents send."""
    content = b""
    async for part in _parts(answer):
        content += part
        if len(content) > MAX_LINE_BYTES:
            raise AgentError(f"an answer is longer than {MAX_LINE_BYTES} bytes")
    return content
