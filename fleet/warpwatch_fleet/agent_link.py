"""The connection to one agent: its stream of records, leases, requests, files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx

from warpwatch_fleet.config import AgentsConfig
from warpwatch_fleet.targets import Target
from warpwatch_runtime.bus import Bus, BusError
from warpwatch_telemetry import clean_text
from warpwatch_telemetry.bus_messages import Publisher, token
from warpwatch_telemetry.captures import OUTCOMES
from warpwatch_telemetry.errors import Refused, UsageError
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)

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

Lines = Callable[[list[bytes]], None]


class AgentError(Exception):
    """Raised for an agent that cannot be followed or asked; the text is one line."""


class AgentLink(Protocol):
    """One agent, as the fleet reaches it. The coroutines are for the loop that follows agents."""

    async def lease(self, job: JobId, raised: Mapping[str, str]) -> None:
        """Tell the agent that the fleet evaluates this job. Raises AgentError, Refused."""

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON of the reply. Raises Refused as the agent does, else AgentError."""

    def download(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file; it blocks, so not for the loop. Raises AgentError."""


class Links(Protocol):
    """The links to all agents, by HTTP or over the bus."""

    def link(self, target: Target) -> AgentLink: ...

    async def close(self) -> None: ...


class HttpLinks:
    """The parts that all links share, for one event loop. Raises UsageError for a bad file.

    holder: the name of this fleet in leases.
    """

    def __init__(self, config: AgentsConfig, holder: str) -> None:
        self.holder = holder
        self.scheme = "https" if config.ca_file is not None else "http"
        self.connecting = asyncio.Semaphore(MAX_CONNECTING)
        self.verify = _context(config) if config.ca_file is not None else False
        self._token = _token(config.token_file)
        self.client = self.new_client()

    def new_client(self) -> httpx.AsyncClient:
        """Return a client with connections of its own."""
        return httpx.AsyncClient(
            verify=self.verify,
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_keepalive_connections=MAX_CONNECTING),
            follow_redirects=False,
            headers={"Accept-Encoding": "gzip"},
            trust_env=False,
        )

    def headers(self, target: Target) -> dict[str, str]:
        """Return the token's header, but none for a tenant's own agent."""
        if self._token is None or target.owner is not None:
            return {}
        return {"Authorization": f"Bearer {self._token()}"}

    def link(self, target: Target) -> HttpLink:
        """Return the link to the agent at this target."""
        return HttpLink(self, target)

    async def close(self) -> None:
        """Close all connections but those that are followed."""
        await self.client.aclose()


class HttpLink:
    """An ``AgentLink`` by HTTP."""

    def __init__(self, agents: HttpLinks, target: Target) -> None:
        self._agents = agents
        self._target = target
        # The certificate of a target that was found by a name is for that name.
        name = target.server_name
        self._extensions = {} if name is None else {"sni_hostname": name}

    def _url(self, path: str) -> str:
        return f"{self._agents.scheme}://{self._target.address}/api/v1/{path}"

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
                    answer = await stack.enter_async_context(
                        client.stream(
                            "GET",
                            self._url("records"),
                            params=params,
                            headers=self._agents.headers(self._target),
                            extensions=self._extensions,
                        )
                    )
                if answer.status_code != 200:
                    raise AgentError(await _refusal(answer))
                async for lines in _paced(_lines(_parts(answer))):
                    receive(lines)
        except httpx.HTTPError as error:
            raise AgentError(in_a_line(error)) from error

    async def lease(self, job: JobId, raised: Mapping[str, str]) -> None:
        await self.request("leases", lease_body(self._agents.holder, job, raised))

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            async with (
                self._agents.connecting,
                asyncio.timeout(ANSWER_S),
                self._agents.client.stream(
                    "POST",
                    self._url(path),
                    json=body,
                    headers=self._agents.headers(self._target),
                    extensions=self._extensions,
                ) as answer,
            ):
                content = await _content(answer)
        except TimeoutError as error:
            raise AgentError(f"no answer within {ANSWER_S:g} s") from error
        except httpx.HTTPError as error:
            raise AgentError(in_a_line(error)) from error
        return read_answer(answer.status_code, content)

    def download(self, path: str) -> Iterator[bytes]:
        headers, verify = self._agents.headers(self._target), self._agents.verify
        try:
            with (
                httpx.Client(verify=verify, timeout=SILENCE_S, trust_env=False) as client,
                client.stream(
                    "GET", self._url(path), headers=headers, extensions=self._extensions
                ) as answer,
            ):
                if answer.status_code != 200:
                    raise AgentError(f"{answer.status_code} for {path}")
                unpack = _unpacker(answer)
                for part in answer.iter_raw():
                    yield from unpack(part)
        except httpx.HTTPError as error:
            raise AgentError(in_a_line(error)) from error


# All workers on a bus are one fleet to an agent.
BUS_HOLDER = "bus"
DOWNLOAD_TIMEOUT_S = 60.0


class BusLinks:
    """The links to agents over one connection, for the event loop ``loop``."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.loop: asyncio.AbstractEventLoop | None = None

    def link(self, target: Target) -> AgentLink:
        publisher = Publisher(target.node or target.address, target.owner)
        return BusLink(self, publisher.requests)

    async def close(self) -> None:
        await self.bus.close()


class BusLink:
    """An ``AgentLink`` over the bus; a file travels as one reply."""

    def __init__(self, links: BusLinks, subject: str) -> None:
        self._links = links
        self._subject = subject

    async def lease(self, job: JobId, raised: Mapping[str, str]) -> None:
        await self.request("leases", lease_body(BUS_HOLDER, job, raised))

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        return read_answer(*await self._ask("post", path, json.dumps(body).encode()))

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            subject = f"{self._subject}.{method}.{token(path)}"
            answer = await self._links.bus.ask(subject, body)
            return int(answer[:3]), answer[3:]
        except (BusError, ValueError) as error:
            raise AgentError(str(error)) from error

    def download(self, path: str) -> Iterator[bytes]:
        if self._links.loop is None:
            raise AgentError("the fleet is starting")
        asked = asyncio.run_coroutine_threadsafe(self._ask("get", path, b""), self._links.loop)
        try:
            status, content = asked.result(DOWNLOAD_TIMEOUT_S)
        except TimeoutError as error:
            asked.cancel()
            raise AgentError(f"no answer within {DOWNLOAD_TIMEOUT_S:g} s") from error
        if status != 200:
            raise AgentError(f"{status} for {path}")
        yield content


def lease_body(holder: str, job: JobId, raised: Mapping[str, str]) -> dict[str, Any]:
    return {**job.fields(), "holder": holder, "seconds": LEASE_S, "raised": dict(raised)}


def read_answer(status: int, content: bytes) -> Any:
    """Return the JSON of a reply. Raises Refused as the agent does, else AgentError."""
    try:
        reply = clean_text.load(content)
    except ValueError as error:
        raise AgentError(f"{status}: no JSON: {error}") from error
    if status in (200, 202):
        return reply
    reason, detail = _refused(reply)
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


async def _refusal(answer: httpx.Response) -> str:
    content = await _content(answer)
    try:
        _, detail = _refused(clean_text.load(content))
    except ValueError:
        detail = " ".join(content.decode(errors="replace").split())[:200]
    return f"{answer.status_code}: {detail}"


async def _content(answer: httpx.Response) -> bytes:
    """Return the body of a reply. Raises AgentError for a longer one than agents send."""
    content = b""
    async for part in _parts(answer):
        content += part
        if len(content) > MAX_LINE_BYTES:
            raise AgentError(f"an answer is longer than {MAX_LINE_BYTES} bytes")
    return content


def _refused(reply: Any) -> tuple[str, str]:
    """Return reason and detail of an error, each in a line."""
    try:
        error = reply["error"]
        return str(error["reason"])[:64], " ".join(str(error["detail"]).split())[:200]
    except (KeyError, TypeError):
        return "", " ".join(str(reply).split())[:200]


def in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")


def _token(path: Path | None) -> Callable[[], str] | None:
    """Return a reader of the token; a changed file is read again. Raises UsageError."""
    if path is None:
        return None

    def read() -> str:
        try:
            return path.read_text().strip()
        except OSError as error:
            raise AgentError(f"fleet.agents.token_file {path}: {error.strerror}") from error

    try:
        if not read():
            raise UsageError(f"fleet.agents.token_file {path} is empty; write the token into it")
    except AgentError as error:
        raise UsageError(str(error)) from error
    return read


def _context(config: AgentsConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca_file)
        if config.cert_file is not None:
            context.load_cert_chain(config.cert_file, config.key_file)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(one) for one in (config.ca_file, config.cert_file) if one)
        raise UsageError(f"fleet.agents: cannot use {files}: {error}") from error
    return context
