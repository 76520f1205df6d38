"""``GET /``: the page, and the policy that lets a browser run nothing but what is ours."""

from __future__ import annotations

import base64
import hashlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from warpwatch_daemon.http.access import Access
from warpwatch_daemon.http.agent import Agent
from warpwatch_daemon.http.page import minutes
from warpwatch_daemon.http.page.captures import capture_views
from warpwatch_daemon.http.page.charts import HEIGHT, WIDTH
from warpwatch_daemon.http.page.devices import MAX_DEVICES, device_views
from warpwatch_daemon.http.page.findings import finding_views
from warpwatch_daemon.http.page.headline import headline
from warpwatch_daemon.http.page.jobs import MAX_JOBS, job_views
from warpwatch_daemon.quantities import seconds, text
from warpwatch_telemetry.state import State

if TYPE_CHECKING:
    from jinja2 import Template

MAX_SOURCES = 32
_FOLDER = Path(__file__).parent / "templates"


class PageEndpoint:
    def __init__(self, agent: Agent, access: Access) -> None:
        self._agent = agent
        self._access = access

    async def show(self, request: Request) -> Response:
        """The web page."""
        page = self._template.render(
            _context(self._agent.state()), files_open=self._access.may_read_files(request)
        )
        headers = {"Content-Security-Policy": self._policy}
        return Response(page, headers=headers, media_type="text/html")

    @cached_property
    def _template(self) -> Template:
        # The page may never be opened: jinja2 takes memory only once it is.
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(_FOLDER),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        return environment.get_template("page.html")

    @cached_property
    def _policy(self) -> str:
        return (
            f"default-src 'none'; style-src '{_digest('style.css')}'; "
            f"script-src '{_digest('refresh.js')}'; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )


def _context(state: State) -> dict[str, object]:
    return {
        "hostname": text(state.hostname),
        "version": text(state.version),
        "headline": headline(state),
        "findings": finding_views(state),
        "jobs": job_views(state),
        "more_jobs": max(0, len(state.jobs) - MAX_JOBS),
        "devices": device_views(state),
        "more_devices": max(0, len(state.devices) - MAX_DEVICES),
        "captures": capture_views(state),
        "sources": state.sources[:MAX_SOURCES],
        "text": text,
        "chart": {"width": WIDTH, "height": HEIGHT},
        "minutes": {"width": minutes.WIDTH, "height": minutes.HEIGHT},
        "seconds": seconds,
    }


def _digest(name: str) -> str:
    """The hash of an inline file, as a content security policy names it."""
    digest = hashlib.sha256((_FOLDER / name).read_bytes()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
