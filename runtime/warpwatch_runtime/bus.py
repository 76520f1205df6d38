"""Provides the connection to NATS that agents and fleets share, and its section `bus`.

The library is imported only where ``bus.url`` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from warpwatch_runtime.log_output import Complaint
from warpwatch_telemetry.bus_messages import INBOX, MAX_MESSAGE_BYTES
from warpwatch_telemetry.errors import UsageError, in_a_line
from warpwatch_telemetry.sections import Section

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js.kv import KeyValue

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
REPLY_S = 10.0
# After a failure; all agents do not come back at once.
RECONNECT_S = 2
# A server that does not reply is found to be away within two of these.
PING_S = 5
# The interval at which the stream reports that it has nothing new.
HEARTBEAT_S = 5.0
# The most chunks of a reply.
MAX_CHUNKS = 256
# Most messages take less, so that an iteration of the loop takes little more.
TURN_S = 0.02


class TlsConfig(Section):
    """The certificates of a connection: the authority of the server's, and one of our own."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @model_validator(mode="after")
    def _is_pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file are needed together")
        return self

    def context(self, section: str) -> ssl.SSLContext:
        """Return what verifies the server. Raises UsageError that names the section."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(one) for one in (self.ca_file, self.cert_file) if one)
            raise UsageError(f"{section}: cannot use {files}: {error}") from error
        return context


class BusConfig(TlsConfig):
    """Where agents and fleet meet instead of over HTTP, such as ``tls://nats.monitoring:4222``.

    owner: the only owner whose jobs an agent reports; a tenant's sidecar has it.
    """

    url: Annotated[str, Field(pattern=r"^(nats|tls)://[^\s@]+$", max_length=1024)] | None = None
    credentials_file: Path | None = None
    nkey_file: Path | None = None
    owner: Annotated[str, Field(pattern=r"^(ns/.+|uid/\d+)$", max_length=128)] | None = None

    @model_validator(mode="after")
    def _has_one_identity(self) -> Self:
        if self.credentials_file is not None and self.nkey_file is not None:
            raise ValueError("one of credentials_file and nkey_file is enough")
        return self


class BusError(Exception):
    """Raised if the bus, or a process behind it, does not reply; the text is one line."""


class ConflictError(BusError):
    """Raised if another process has changed a key meanwhile."""


class Turns:
    """Bounds the part of each iteration of an event loop in which messages are applied.

    All readers may have messages at once, and a request takes some iterations. Without the bound,
    the renewal of a lease would wait for several messages of each reader.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # The end of this iteration's part; none has begun before its first message.
        self._until = math.inf

    async def run(self, work: Callable[[], None]) -> None:
        """Do the work in this iteration or a later one; those that wait take turns."""
        while self._monotonic() >= self._until:
            await asyncio.sleep(0)
        if self._until == math.inf:
            self._until = self._monotonic() + TURN_S
            asyncio.get_running_loop().call_soon(self._end)
        work()
        if self._monotonic() >= self._until:
            # Two iterations later, those that wait come first.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _end(self) -> None:
        self._until = math.inf


class Bus:
    """A connection that reconnects by itself, for one event loop.

    If the server itself ends it, as when its user has expired, call ``connect`` again.
    name: the part of its inbox's subject, which no other connection may read.
    """

    def __init__(self, config: BusConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._client: Client | None = None
        self._complaint = Complaint(logger, logging.WARNING)
        self.turns = Turns()

    @property
    def client(self) -> Client:
        assert self._client is not None, "connect comes first"
        return self._client

    @property
    def is_connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def is_closed(self) -> bool:
        return self._client is not None and self._client.is_closed

    async def connect(self) -> None:
        """Connect, waiting for the server. Raises UsageError for files that cannot be used."""
        from nats.aio.client import Client

        if self._client is not None:
            reason = self._client.last_error
            logger.warning("the bus %s: connecting again: %s", self._config.url, reason)
            await self.close()
        config = self._config
        security: dict[str, Any] = {"tls": config.context("bus")} if _is_tls(config) else {}
        if config.credentials_file is not None:
            security["user_credentials"] = str(config.credentials_file)
        if config.nkey_file is not None:
            security["nkeys_seed"] = str(config.nkey_file)

        async def complain(error: Exception) -> None:
            self._complaint.make("the bus %s: %s", config.url, in_a_line(error))

        async def clear() -> None:
            self._complaint.clear()
            logger.info("the bus %s: connected again", config.url)

        # Known before it connects, so that an attempt that is cancelled is closed as well.
        self._client = Client()
        await self._client.connect(
            str(config.url), name=self._name, inbox_prefix=f"{INBOX}.{self._name}",
            error_cb=complain, reconnected_cb=clear, max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_S, connect_timeout=CONNECT_TIMEOUT_S,
            ping_interval=PING_S, max_outstanding_pings=2, pending_size=8 * 2**20, **security,
        )  # fmt: skip

    async def close(self) -> None:
        if self._client is not None and not self._client.is_closed:
            # The last messages do not go out if the server has just gone away.
            with contextlib.suppress(OSError):
                await self._client.close()

    # --- the stream ---

    async def publish(self, subject: str, content: bytes, ident: str) -> None:
        """Put a message into the stream; one with an ``ident`` that it has is left out.

        Raises BusError, at once if the server is away: the library would keep the message for it.
        """
        if not self.is_connected:
            raise BusError("the server is away")
        async with _as_bus_errors():
            headers = {"Nats-Msg-Id": ident}
            await self.client.jetstream().publish(subject, content, REPLY_S, headers=headers)

    async def send(self, subject: str, content: bytes) -> None:
        """Send a message to the present listeners. Raises BusError."""
        async with _as_bus_errors():
            await self.client.publish(subject, content)

    async def listen(self, subject: str, receive: Callable[[bytes], None]) -> None:
        async def received(message: Msg) -> None:
            receive(message.data)

        await self.client.subscribe(subject, cb=received)

    # --- requests ---

    async def serve(self, subject: str, reply: Callable[[str, bytes], Awaitable[bytes]]) -> None:
        """Reply to all requests below the subject; ``reply`` gets the rest of it, and the body."""
        running: set[asyncio.Task[None]] = set()

        async def send(message: Msg) -> None:
            try:
                content = await reply(message.subject.removeprefix(f"{subject}."), message.data)
            except Exception:
                logger.exception("a request on the bus failed: %.200s", message.subject)
                return
            for start in range(0, max(1, len(content)), MAX_MESSAGE_BYTES):
                end = start + MAX_MESSAGE_BYTES
                headers = {"More": "1"} if end < len(content) else None
                await self.client.publish(message.reply, content[start:end], headers=headers)

        async def received(message: Msg) -> None:
            # A slow request delays no other.
            task = asyncio.create_task(send(message))
            running.add(task)
            task.add_done_callback(running.discard)

        await self.client.subscribe(f"{subject}.>", cb=received)

    async def request(self, subject: str, body: bytes, timeout_s: float = REPLY_S) -> bytes:
        """Return the whole reply. Raises BusError."""
        parts: list[bytes] = []
        async with _as_bus_errors():
            inbox = self.client.new_inbox()
            replies = await self.client.subscribe(inbox)
            try:
                await self.client.publish(subject, body, reply=inbox)
                for _ in range(MAX_CHUNKS):
                    reply = await replies.next_msg(timeout_s)
                    headers = reply.headers or {}
                    if headers.get("Status") == "503":
                        raise BusError(f"nothing answers {subject}")
                    parts.append(reply.data)
                    if "More" not in headers:
                        return b"".join(parts)
                raise BusError(f"more than {MAX_CHUNKS} chunks")
            finally:
                await replies.unsubscribe()

    # --- buckets ---

    async def bucket(self, name: str) -> Bucket:
        """Return a bucket. Raises BusError if there is none."""
        async with _as_bus_errors():
            return Bucket(await self.client.jetstream().key_value(name))


class StreamMessage(NamedTuple):
    """A message of the stream. ident: its publisher's; at: when the stream got it, wall clock."""

    subject: str
    ident: str
    content: bytes
    at: float


class StreamReader:
    """Reads the messages of a stream in order, each once, while the connection comes and goes.

    since: a wall clock time. Call ``check`` every few seconds.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        subject: str,
        since: float,
        receive: Callable[[StreamMessage], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._subject = subject
        self._since = since
        self._receive = receive
        self._monotonic = monotonic
        self._sequence = 0
        self._expected = 1
        self._received_at = monotonic()
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Begin after the last message. Raises BusError."""
        await self.stop()
        self._expected, self._received_at = 1, self._monotonic()
        client = self._bus.client
        async with _as_bus_errors():
            self._subscription = await client.subscribe(client.new_inbox(), cb=self._received)
        wanted = {"stream_name": self._stream, "config": self._config(self._subscription.subject)}
        reply = await self._bus.request(
            f"$JS.API.CONSUMER.CREATE.{self._stream}", json.dumps(wanted).encode()
        )
        if error := json.loads(reply).get("error"):
            raise BusError(f"{self._stream}: {error.get('description')}")

    def _config(self, inbox: str) -> dict[str, Any]:
        at = datetime.fromtimestamp(self._since, UTC).isoformat()
        start: dict[str, Any] = {"deliver_policy": "by_start_time", "opt_start_time": at}
        if self._sequence:
            start = {"deliver_policy": "by_start_sequence", "opt_start_seq": self._sequence + 1}
        return start | {
            "deliver_subject": inbox, "filter_subject": self._subject, "ack_policy": "none",
            "max_deliver": 1, "flow_control": True, "idle_heartbeat": int(HEARTBEAT_S * 1e9),
            "mem_storage": True, "num_replicas": 1, "replay_policy": "instant",
        }  # fmt: skip

    async def stop(self) -> None:
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            with contextlib.suppress(BusError):  # it has ended with its connection
                async with _as_bus_errors():
                    await subscription.unsubscribe()

    async def check(self) -> None:
        """Start again if the server has forgotten this reader. Raises BusError."""
        late = self._monotonic() - self._received_at > 2 * HEARTBEAT_S + 1.0
        if self._subscription is None or late or self._expected < 1:
            await self.start()

    async def _received(self, message: Msg) -> None:
        self._received_at = self._monotonic()
        headers = message.headers or {}
        if "Status" in headers:
            # The server waits for a reply before it sends more.
            if subject := message.reply or headers.get("Nats-Consumer-Stalled"):
                await self._bus.client.publish(subject)
            return
        place = message.metadata
        if place.sequence.consumer != self._expected:
            # Something is missing: ``check`` starts again.
            self._expected = 0
            return
        self._expected += 1
        ident = headers.get("Nats-Msg-Id", "")
        at = place.timestamp.timestamp()
        content = StreamMessage(message.subject, ident, message.data, at)
        await self._bus.turns.run(partial(self._apply, content, place.sequence.stream))

    def _apply(self, message: StreamMessage, sequence: int) -> None:
        # A message that waits for its turn comes again if ``check`` starts again meanwhile.
        self._sequence = sequence
        self._receive(message)


class Bucket:
    """Keys with values and revisions. Everything raises BusError."""

    def __init__(self, keys: KeyValue) -> None:
        self._keys = keys

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """Return the value and its revision, or None."""
        from nats.js.errors import KeyNotFoundError

        async with _as_bus_errors():
            try:
                entry = await self._keys.get(key)
            except KeyNotFoundError:
                return None
            return entry.value or b"", entry.revision or 0

    async def put(self, key: str, value: bytes, revision: int | None = None) -> int:
        """Write and return the revision.

        revision: the one that is replaced, 0 for none: raises ConflictError if it is another.
        """
        from nats.js.errors import KeyWrongLastSequenceError

        async with _as_bus_errors():
            try:
                if revision is None:
                    return await self._keys.put(key, value)
                if revision == 0:
                    return await self._keys.create(key, value)
                return await self._keys.update(key, value, revision)
            except KeyWrongLastSequenceError as error:
                raise ConflictError(f"{key} was changed by another") from error

    async def remove(self, key: str, revision: int | None = None) -> None:
        async with _as_bus_errors():
            await self._keys.delete(key, revision)


@contextlib.asynccontextmanager
async def _as_bus_errors() -> AsyncIterator[None]:
    """Turn the library's errors into BusError."""
    import nats.errors

    try:
        yield
    except (nats.errors.Error, OSError) as error:
        raise BusError(in_a_line(error)) from error


def _is_tls(config: BusConfig) -> bool:
    return str(config.url).startswith("tls:") or config.ca_file is not None


def check(config: BusConfig) -> None:
    """Check the library and the files. Raises UsageError."""
    try:
        import nats  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError("bus.url needs NATS' library: install the extra warpwatch[bus]") from error
    for key in ("credentials_file", "nkey_file"):
        path = getattr(config, key)
        try:
            if path is not None and not path.read_bytes().strip():
                raise UsageError(f"bus.{key} {path} is empty")
        except OSError as error:
            raise UsageError(f"bus.{key} {path}: {error.strerror}") from error
    if _is_tls(config):
        config.context("bus")
