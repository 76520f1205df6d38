"""HTTP connections of the fleet that leave no socket behind."""

import asyncio
from typing import Any

import httpx


class Transport(httpx.AsyncHTTPTransport):
    """Close also what a cancelled request has opened: httpcore forgets it until TLS is agreed."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        opened: list[Any] = []

        async def trace(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                opened.append(info["return_value"])
            elif event == "connection.start_tls.complete":
                opened.clear()

        request.extensions = {**request.extensions, "trace": trace}
        try:
            return await super().handle_async_request(request)
        except asyncio.CancelledError:
            for stream in opened:
                await stream.aclose()
            raise
