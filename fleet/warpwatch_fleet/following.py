"""Following one agent: its stream is read as fast as the agent may be, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from warpwatch_fleet.config import AgentsConfig, ShardConfig
from warpwatch_fleet.targets import Target
from warpwatch_telemetry import clean_text
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
RETRY_S = (1.0, 30.0)
# Of one agent: 128 ranks at 30 steps a second. Who sends more is read no faster, and loses what
# its own buffer does not hold.
MAX_LINES_PER_S = 5000
MAX_BYTES_PER_S = 4 * 2**20
MAX_LINE_BYTES = 2**20
# A job is judged by the fleet for so long unless it says so again.
LEASE_S = 60.0

Lines = Callable[[list[bytes]], None]


class AgentError(Exception):
    """Why an agent cannot be followed, in one line."""


class Agents:
    """The connections to all agents. For one event loop. Raises UsageError for a bad file.

    holder: what the fleet calls itself where it takes leases.
    """

    def __init__(self, config: AgentsConfig, shard: ShardConfig, holder: str) -> None:
        self._holder = holder
        self._shard = shard
        self._scheme = "https" if config.ca_file is not None else "http"
        self._token = _token(config.token_file)
        self._connecting = asyncio.Semaphore(MAX_CONNECTING)
        self._verify = _context(config) if config.ca_file is not None else False
        self._client = self._new_client()

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            verify=self._verify,
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_keepalive_connections=MAX_CONNECTING),
            follow_redirects=False,
            headers={"Accept-Encoding": "gzip"},
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def follow(self, target: Target, cursor: Callable[[], str | None], take: Lines) -> None:
        """Until it ends; ``take`` gets whole lines as they come. Raises AgentError."""
        params: dict[str, Any] = {"follow": "true"}
        params["shard"] = f"{self._shard.index}/{self._shard.of}"
        if (after := cursor()) is not None:
            params["after"] = after
        url = f"{self._scheme}://{target.address}/api/v1/records"
        # A client of its own: what a pool does for a connection takes longer the more it has.
        try:
            async with self._new_client() as client, contextlib.AsyncExitStack() as stack:
                async with self._connecting:
                    answer = await stack.enter_async_context(
                        client.stream(
                            "GET",
                            url,
                            params=params,
                            headers=self._headers(target),
                            extensions=_extensions(target),
                        )
                    )
                if answer.status_code != 200:
                    raise AgentError(await _refusal(answer))
                async for lines in _paced(_lines(_parts(answer))):
                    take(lines)
        except httpx.HTTPError as error:
            raise AgentError(_in_a_line(error)) from error

    async def lease(self, target: Target, job: JobId, raised: Mapping[str, str]) -> None:
        """Tell an agent that the fleet judges this job. Raises AgentError, Refused."""
        said = {"holder": self._holder, "seconds": LEASE_S, "raised": dict(raised)}
        await self.ask(target, "leases", {**job.fields(), **said})

    async def ask(self, target: Target, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that an agent answers. Raises Refused as the agent does, else AgentError."""
        url = f"{self._scheme}://{target.address}/api/v1/{path}"
        try:
            async with (
                self._connecting,
                asyncio.timeout(ANSWER_S),
                self._client.stream(
                    "POST",
                    url,
                    json=body,
                    headers=self._headers(target),
                    extensions=_extensions(target),
                ) as answer,
            ):
                content = await _content(answer)
        except TimeoutError as error:
            raise AgentError(f"no answer within {ANSWER_S:g} s") from error
        except httpx.HTTPError as error:
            raise AgentError(_in_a_line(error)) from error
        try:
            said = clean_text.load(content)
        except ValueError as error:
            raise AgentError(f"{answer.status_code}: no JSON: {error}") from error
        if answer.status_code in (200, 202):
            return said
        reason, detail = _refused(said)
        if reason in OUTCOMES:
            raise Refused(reason, detail)
        raise AgentError(f"{answer.status_code}: {detail}")

    def download(self, target: Target, path: str) -> Iterator[bytes]:
        """The content of a file, as it comes. It blocks: not for the loop. Raises AgentError."""
        url = f"{self._scheme}://{target.address}/api/v1/{path}"
        try:
            with (
                httpx.Client(verify=self._verify, timeout=SILENCE_S, trust_env=False) as client,
                client.stream(
                    "GET", url, headers=self._headers(target), extensions=_extensions(target)
                ) as answer,
            ):
                if answer.status_code != 200:
                    raise AgentError(f"{answer.status_code} for {path}")
                unpack = _unpacker(answer)
                for part in answer.iter_raw():
                    yield from unpack(part)
        except httpx.HTTPError as error:
            raise AgentError(_in_a_line(error)) from error

    def _headers(self, target: Target) -> dict[str, str]:
        """An agent that is a tenant's own is not shown the token of all."""
        if self._token is None or target.owner is not None:
            return {}
        return {"Authorization": f"Bearer {self._token()}"}


def _extensions(target: Target) -> dict[str, str]:
    """Of a target that was found by a name, the certificate is of that name."""
    return {} if target.server_name is None else {"sni_hostname": target.server_name}


async def again_and_again(
    follow: Callable[[], Any],
    failed: Callable[[str], None],
    ended: Callable[[], None],
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Follow an agent until cancelled, later and later while it cannot be reached."""
    wait_s = RETRY_S[0]
    while True:
        begun = monotonic()
        try:
            await follow()
            ended()
        except AgentError as error:
            failed(str(error))
        except Exception as error:
            logger.exception("following is tried again")
            failed(f"following failed: {_in_a_line(error)}")
        if monotonic() - begun > SILENCE_S:
            wait_s = RETRY_S[0]
        # Not all agents at once when the network is back.
        await sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(2 * wait_s, RETRY_S[1])


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
    """In portions, at most MAX_LINES_PER_S and MAX_BYTES_PER_S of them on average."""
    allowed_at = monotonic()
    async for lines in batches:
        for begin in range(0, len(lines), MAX_LINES_PER_S // 10):
            portion = lines[begin : begin + MAX_LINES_PER_S // 10]
            yield portion
            now = monotonic()
            # What was not used is saved for ten seconds: a new reader gets what was kept for it.
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
    """As much as an agent has to say at once; one that says more is none. Raises AgentError."""
    content = b""
    async for part in _parts(answer):
        content += part
        if len(content) > MAX_LINE_BYTES:
            raise AgentError(f"an answer is longer than {MAX_LINE_BYTES} bytes")
    return content


def _refused(said: Any) -> tuple[str, str]:
    """Reason and detail of an error, each in a line."""
    try:
        error = said["error"]
        return str(error["reason"])[:64], " ".join(str(error["detail"]).split())[:200]
    except (KeyError, TypeError):
        return "", " ".join(str(said).split())[:200]


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")


def _token(path: Path | None) -> Callable[[], str] | None:
    """Reads the token; a file that changes is read again. Raises UsageError."""
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
