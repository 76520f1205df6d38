"""``/api/v1/records``: what happens on this node, line by line, for a fleet."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable

from prometheus_client.exposition import gzip_accepted
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from warpwatch_daemon.for_fleet import documents
from warpwatch_daemon.for_fleet.agent import Agent
from warpwatch_daemon.for_fleet.record_stream import Shard
from warpwatch_serving.access import Access
from warpwatch_serving.answers import ApiError
from warpwatch_serving.request_data import filters
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.records import Clock
from warpwatch_telemetry.stream import CursorLine, encode_stream_line

# How often a follower is sent what there is: a step is known to it within this and the poll of
# the rings.
INTERVAL_S = 0.5
# Shards of a fleet, one that is being replaced, and a person who looks.
MAX_FOLLOWERS = 8
MEDIA_TYPE = "application/x-ndjson"


class RecordsEndpoint:
    def __init__(self, agent: Agent, access: Access, wall: Callable[[], float] = time.time) -> None:
        self._agent = agent
        self._wall = wall
        self._access = access
        self._followers = 0

    async def send(self, request: Request) -> Response:
        """Lines of the telemetry log as they come, and anomalies and captures as they change."""
        self._access.check_all_jobs(request, "the records of all users' jobs")
        wanted = filters(request, documents.RecordFilters)
        if wanted.follow and self._followers >= MAX_FOLLOWERS:
            detail = f"{MAX_FOLLOWERS} follow already"
            raise ApiError(503, "too_many_followers", detail, {"Retry-After": "10"})
        try:
            self._agent.records().read(wanted.after, Shard(0, 1))
        except ValueError as error:
            raise ApiError(400, "bad_request", f"query: after: {error}") from error
        compressed = gzip_accepted(request.headers.get("accept-encoding", ""))
        headers = {"vary": "Accept-Encoding"}
        if compressed:
            headers["content-encoding"] = "gzip"
        batches = self._batches(wanted)
        return StreamingResponse(
            _gzipped(batches) if compressed else batches, headers=headers, media_type=MEDIA_TYPE
        )

    async def _batches(self, wanted: documents.RecordFilters) -> AsyncIterator[bytes]:
        stream, cursor, shard = self._agent.records(), wanted.after, Shard(*wanted.parts)
        state = self._agent.state()
        self._followers += wanted.follow
        try:
            while True:
                batch = stream.read(cursor, shard)
                cursor = batch.cursor
                end = CursorLine(cursor, state.hostname, state.version)
                # All that happened until then has been sent.
                clock = b"" if batch.more else encode_line(Clock(self._wall())) or b""
                yield batch.lines + clock + encode_stream_line(end)
                if stream.closed or not (wanted.follow or batch.more):
                    return
                if not batch.more:
                    await asyncio.sleep(INTERVAL_S)
        finally:
            self._followers -= wanted.follow


async def _gzipped(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Each part can be read when it has come."""
    packer = zlib.compressobj(level=1, wbits=31)
    async for part in parts:
        yield packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH)
    yield packer.flush()
