"""How the API server asks for the shim: `POST /inject`, by HTTPS, with a certificate of its own.

Whoever reaches the port may ask: the answer follows from the question and the chart's values alone.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import threading
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from warpwatch_fleet.config import InjectionConfig
from warpwatch_fleet.kubernetes import injection
from warpwatch_serving.connection import Connections, Service
from warpwatch_serving.listening import listen_on
from warpwatch_serving.server import Listeners
from warpwatch_serving.web_config import Tls, TlsServerConfig
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

# An object of the API is at most 1.5 MiB.
MAX_BYTES = 2 * 2**20
# API servers ask over a few connections each; together they may hold MAX_BYTES of each.
MAX_REQUESTS = 64
CERTIFICATE_INTERVAL_S = 10


class InjectionServer:
    """Serves in a thread of its own, so that no client delays the loop that follows the agents.

    Raises UsageError.
    """

    def __init__(self, config: InjectionConfig) -> None:
        self._parts = injection.load(config)
        try:
            self._tls = Tls(TlsServerConfig(cert_file=config.cert_file, key_file=config.key_file))
        except UsageError as error:
            text = str(error).rpartition("config: ")[2]
            raise UsageError(f"fleet.kubernetes.injection: {text}") from error
        self.listener = listen_on(config.listen, "fleet.kubernetes.injection.listen")
        self._seconds = 0
        self._listeners = Listeners(self._each_second)
        app = Starlette(routes=[Route("/inject", self._inject, methods=["POST"])])
        connections = Connections(MAX_REQUESTS, MAX_REQUESTS)
        self._listeners.add(self.listener, Service(app, self._tls.context), connections)

    async def run_beside(self) -> None:
        """Serve in a thread until cancelled."""
        serve = self._listeners.serve
        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="injection")
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            self._listeners.stop()
            thread.join()

    def _each_second(self) -> None:
        if self._seconds % CERTIFICATE_INTERVAL_S == 0:
            self.refresh()
        self._seconds += 1

    def refresh(self) -> None:
        """Use a renewed certificate for new connections."""
        try:
            if self._tls.refresh():
                logger.info("reloaded the renewed certificate of the injection")
        except (OSError, ssl.SSLError) as error:
            logger.warning("reload failed, old certificate of the injection kept: %s", error)

    async def _inject(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BYTES:
                return Response(status_code=413)
        return answer(body, self._parts)


def answer(body: bytes, parts: injection.Parts) -> Response:
    """Return the reviewed pod, or 400 for a body that is no review of a pod."""
    try:
        asked = msgspec.json.decode(body, type=dict[str, Any])
        reviewed = dict(injection.review(asked, parts))
        response = reviewed["response"]
        if "patch" in response:
            patch = base64.b64encode(msgspec.json.encode(response["patch"])).decode()
            reviewed["response"] = {**response, "patch": patch, "patchType": "JSONPatch"}
        return Response(msgspec.json.encode(reviewed), media_type="application/json")
    except (
        msgspec.MsgspecError,
        ValueError,
        RecursionError,
        LookupError,
        TypeError,
        AttributeError,
    ):
        # The API server checks pods before it sends them, so this came from somebody else.
        return Response("an AdmissionReview of a pod is needed\n", 400)
