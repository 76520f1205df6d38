"""``/api/v1/records``: the records of this node, line by line, for a fleet."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Protocol

from prometheus_client.exposition import gzip_accepted
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from warpwatch_daemon.for_fleet.record_stream import RecordStream, Shard
from warpwatch_serving.access import Access
from warpwatch_serving.answers import HttpError
from warpwatch_serving.bodies import Filters, filters
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.records import Clock
from warpwatch_telemetry.state import State
from warpwatch_telemetry.stream import CursorLine, encode_stream_line

# A follower receives new lines this often: it has a step within this and the poll of the rings.
INTERVAL_S = 0.5
# The shards of a fleet, one that is being replaced, and a person who reads along.
MAX_FOLLOWERS = 8
MEDIA_TYPE = "application/x-ndjson"


class RecordFilters(Filters):
    """after: the cursor of the last batch; shard: ``index/of`` of those who share the jobs."""

    after: Annotated[str | None, Field(max_length=64)] = None
    follow: bool = False
    shard: Annotated[str, Field(pattern=r"^\d{1,3}/\d{1,3}$")] = "0/1"

    @model_validator(mode="after")
    def _shard_exists(self) -> RecordFilters:
        index, of = self.parts
        if index >= of:
            raise ValueError(f"shard: there is no {index} of {of}; they count from 0")
        return self

    @property
    def parts(self) -> tuple[int, int]:
        """The index and the number of shards."""
        index, _, of = self.shard.partition("/")
        return int(index), int(of)


class RecordSource(Protocol):
    """The agent whose records are sent."""

    def state(self) -> State: ...

    def records(self) -> RecordStream: ...


class RecordsEndpoint:
    """The endpoint, and the followers that it sends to."""

    def __init__(
        self, agent: RecordSource, access: Access, wall: Callable[[], float] = time.time
    ) -> None:
        self._agent = agent
        self._wall = wall
        self._access = access
        self._followers = 0

    async def send(self, request: Request) -> Response:
        """Lines of the telemetry log as they come, and anomalies and captures as they change."""
        self._access.check_all_jobs(request, "the records of all users' jobs")
        wanted = filters(request, RecordFilters)
        if wanted.follow and self._followers >= MAX_FOLLOWERS:
            detail = f"{MAX_FOLLOWERS} follow already"
            raise HttpError(503, "too_many_followers", detail, {"Retry-After": "10"})
        try:
            self._agent.records().read(wanted.after, Shard(0, 1))
        except ValueError as error:
            raise HttpError(400, "bad_request", f"query: after: {error}") from error
        compressed = gzip_accepted(request.headers.get("accept-encoding", ""))
        headers = {"vary": "Accept-Encoding"}
        if compressed:
            headers["content-encoding"] = "gzip"
        batches = self._batches(wanted)
        return StreamingResponse(
            _gzipped(batches) if compressed else batches, headers=headers, media_type=MEDIA_TYPE
        )

    async def _batches(self, wanted: RecordFilters) -> AsyncIterator[bytes]:
        stream, cursor, shard = self._agent.records(), wanted.after, Shard(*wanted.parts)
        state = self._agent.state()
        self._followers += wanted.follow
        try:
            while True:
                batch = stream.read(cursor, shard)
                cursor = batch.cursor
                end = CursorLine(cursor, state.hostname, state.version)
                # By the clock, a follower knows until when it has everything.
                clock = b"" if batch.more else encode_line(Clock(self._wall())) or b""
                yield batch.lines + clock + encode_stream_line(end)
                if stream.closed or not (wanted.follow or batch.more):
                    return
                if not batch.more:
                    await asyncio.sleep(INTERVAL_S)
        finally:
            self._followers -= wanted.follow


async def _gzipped(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts compressed, each so that it can be read once it has come."""
    packer = zlib.compressobj(level=1, wbits=31)
    async for part in parts:
        yield packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH)
    yield packer.flush()
