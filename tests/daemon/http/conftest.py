"""A node in trouble, an agent that knows it by heart, and a real server in front of it."""

import itertools
import json
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.daemon.http.certificates import make_certificate
from tests.loop.other_users import request
from warpwatch_daemon.for_fleet.api import agent_routes
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_exporters.prometheus import Options
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_serving import connection
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.page.endpoint import PageEndpoint
from warpwatch_serving.server import Server
from warpwatch_telemetry.alerts import Alert, AlertAnswer
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext
from warpwatch_telemetry.captures import Capture, CaptureRequest, Prepared
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId, RunSummary
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Device, DeviceSample
from warpwatch_telemetry.state import State

NOW = 1_790_000_000.0
SESSIONS = "/api/v1/sessions"
# Only a hang takes longer.
TIMEOUT_S = 300


def gpu(index: int) -> DeviceSample:
    busy = index < 2
    values: dict[SeriesKey, float] = {
        ("device_utilization_ratio", ()): 0.79 - 0.14 * index if busy else 0.0,
        ("device_memory_used_bytes", ()): (48.2 + index if busy else 0.4) * 2**30,
        ("device_memory_total_bytes", ()): 80.0 * 2**30,
        ("device_power_watts", ()): 431.0 + 31 * index if busy else 71.0 + index,
        ("device_power_limit_watts", ()): 700.0,
        ("device_temperature_celsius", ("gpu",)): 61.0 + index if busy else 33.0 + index,
        ("device_clock_hertz", ("sm",)): 1.755e9 if busy else 345e6,
        ("device_clock_max_hertz", ("sm",)): 1.98e9,
        ("device_throttle_active", ("idle",)): 0.0 if busy else 1.0,
        ("device_throttle_active", ("sw_power_cap",)): float(index == 1),
    }
    uuid = f"GPU-5f1d0000-0000-0000-0000-00000000000{index}"
    name, info = "NVIDIA H100 80GB HBM3 (simulated)", {"simulated": "true"}
    return DeviceSample(Device(uuid, index, name, info=info), NOW - 0.4, values)


_NODE = msgspec.json.decode(
    Path(__file__).with_name("node_in_trouble.json").read_bytes(), type=State
)
ENDED, STRAGGLER = _NODE.anomalies
CAPTURE = _NODE.captures[1]
TRACE = CAPTURE.files[-1]


def around_straggler() -> AnomalyContext:
    """Eight minutes before it and its 41 seconds: rank 1 got slow, and its GPU did not."""
    return _NODE.contexts["a7"]


def node_in_trouble() -> State:
    return replace(
        _NODE,
        devices=tuple(gpu(index) for index in range(8)),
        ranks=tuple(replace(one, recent_s=119 * (0.212,) + 81 * (0.339,)) for one in _NODE.ranks),
    )


class MemoryAgent:
    def __init__(self, folder: Path) -> None:
        self.reset(folder)

    def reset(self, folder: Path) -> None:
        # This removes what a test has put in place of a method, too.
        vars(self).clear()
        self.now = node_in_trouble()
        self.metrics = AgentMetrics()
        self.lacks: tuple[str, ...] = ()
        self.refusal: Refused | None = None
        self.asked: list[CaptureRequest] = []
        self.stored: dict[str, tuple[Anomaly, AnomalyContext | None]] = {}
        self.seen: tuple[dict[str, list[DetectorStatus]], tuple[Suppressed, ...]] = ({}, ())
        self.folder = folder
        self.stream = RecordStream()
        self.leased: list[tuple[JobId, str, float]] = []
        self.runs: list[RunSummary] = []

    @property
    def codes(self) -> Counter[int]:
        samples = (one for family in self.metrics.registry.collect() for one in family.samples)
        requests = (one for one in samples if one.name == "warpwatch_http_requests_total")
        return Counter({int(one.labels["code"]): int(one.value) for one in requests})

    async def prepare(self, path: str) -> None: ...

    def records(self) -> RecordStream:
        return self.stream

    def _refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def lease(self, job: JobId, holder: str, seconds: float, raised: Mapping[str, str]) -> None:
        self._refuse()
        self.leased.append((job, holder, seconds))

    def state(self) -> State:
        return self.now

    exported = overview = state

    def exposition(self) -> Options:
        return Options()

    def missing(self) -> tuple[str, ...]:
        return self.lacks

    def request_capture(
        self, request: CaptureRequest, name: str = "", start_step: int | None = None
    ) -> Capture:
        self._refuse()
        self.asked.append(request)
        return Capture(name or "20260921T150000-aaaaaa", request, NOW, start_step=start_step)

    def prepare_capture(self, request: CaptureRequest) -> Prepared:
        self._refuse()
        return Prepared((0, 1), request.steps, 412, 0.212)

    def resolve_anomaly(self, anomaly_id: str, who: str) -> Anomaly:
        found = next((one for one in self.now.anomalies if one.id == anomaly_id), None)
        if found is None:
            raise Refused("not_found", "there is no such active anomaly")
        return replace(found, summary=f"{found.summary}, resolved by {who}")

    def cancel_capture(self, name: str) -> Capture | None:
        return next((one for one in self.now.captures if one.id == name), None)

    def capture_file(self, capture_id: str, name: str, owner: str | None) -> Path | None:
        path = self.folder / name
        return path if capture_id == CAPTURE.id and path.is_file() else None

    def anomaly(self, anomaly_id: str) -> tuple[Anomaly, AnomalyContext | None] | None:
        return self.stored.get(anomaly_id)

    def run_summaries(self) -> list[RunSummary]:
        return self.runs

    def detector_statuses(self) -> tuple[dict[str, list[DetectorStatus]], tuple[Suppressed, ...]]:
        return self.seen

    def receive_alerts(self, alerts: Sequence[Alert], own_name: str) -> list[AlertAnswer]:
        """A node that has no ranks for alerts: tests of what becomes of them have a real one."""
        return [AlertAnswer(alert.fingerprint, "no_rank") for alert in alerts]


Serve = Callable[..., Server]
SOCKETS: dict[Server, Path] = {}


_SECONDS = itertools.count(0.0, 5.0)


def unlimited() -> float:
    return next(_SECONDS)


def socket_of(server: Server) -> Path:
    return SOCKETS[server]


def http_client(url: str, **about: Any) -> httpx.Client:
    """Return a client without TLS: reading the trusted certificates takes longer than a test."""
    return httpx.Client(base_url=url, verify=False, timeout=TIMEOUT_S, **about)


def local_client(server: Server) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(socket_of(server)), verify=False)
    return http_client("http://localhost", transport=transport)


def link_to(server: Server, uid: int | None = None) -> str:
    if uid is not None:
        return str(json.loads(request(uid, socket_of(server), SESSIONS, {})[1])["path"])
    with local_client(server) as local:
        return str(local.post(SESSIONS).json()["path"])


def certified(folder: Path, name: str) -> Path:
    """Return the folder with a certificate of the DNS name, tls.crt, and a web.yml for it."""
    make_certificate(folder, subject=f"DNS:{name}")
    text = "tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n"
    (folder / "web.yml").write_text(text)
    return folder


@contextmanager
def servers(agent: Any) -> Iterator[Serve]:
    """Yield what starts a server with the given ``http`` section on a free port."""
    with ExitStack() as stack:
        # Deadlines that a client on a busy machine could miss.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for limit in ("HEAD_TIMEOUT_S", "WRITE_TIMEOUT_S"):
            patch.setattr(connection, limit, TIMEOUT_S)
        patch.setattr(connection, "RATE_PER_S", 1e9)

        def start(
            clocks: Mapping[str, Callable[[], float]] | None = None,
            passed: socket.socket | None = None,
            page: PageEndpoint | None = None,
            **section: Any,
        ) -> Server:
            config = HttpConfig(**{"listen": "127.0.0.1:0", **section})
            known: dict[str, Any] = {"monotonic": unlimited, **(clocks or {})}
            wall = {"wall": known.pop("wall")} if "wall" in known else {}
            routes = partial(agent_routes, **wall)
            server = Server(agent, config, page, routes, passed=passed, **known)
            folder = Path(f"{tempfile.mkdtemp(prefix='warpwatch-test-')}-api")
            SOCKETS[server] = folder / "api.sock"
            server.bind_locally(SOCKETS[server])
            for path in (folder, folder.with_name(folder.name.removesuffix("-api"))):
                stack.callback(shutil.rmtree, path, ignore_errors=True)
            thread = threading.Thread(target=server.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def shared_agent() -> MemoryAgent:
    return MemoryAgent(Path())


@pytest.fixture
def agent(shared_agent: MemoryAgent, tmp_path: Path) -> MemoryAgent:
    """Fresh for each test, though the server of ``client`` runs on."""
    folder = tmp_path / "capture"
    folder.mkdir()
    shared_agent.reset(folder)
    return shared_agent


@pytest.fixture
def serve(agent: MemoryAgent) -> Iterator[Serve]:
    """Starts a server with the given ``http`` section on a free port; all end with the test."""
    with servers(agent) as start:
        yield start


@pytest.fixture(scope="session")
def shared_server(shared_agent: MemoryAgent) -> Iterator[Server]:
    """A server without configuration for all tests."""
    with servers(shared_agent) as start:
        yield start({"wall": lambda: NOW})


@pytest.fixture(scope="session")
def url(shared_server: Server) -> str:
    return shared_server.url


@pytest.fixture(scope="session")
def shared_client(shared_server: Server) -> Iterator[httpx.Client]:
    with local_client(shared_server) as client:
        yield client


@pytest.fixture
def client(
    shared_server: Server,
    shared_client: httpx.Client,
    agent: MemoryAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> httpx.Client:
    """On the socket, which commands find too: it may do everything."""
    folder = socket_of(shared_server).parent
    monkeypatch.setenv("WARPWATCH_DIR", str(folder).removesuffix("-api"))
    return shared_client


@pytest.fixture
def tcp(url: str, agent: MemoryAgent) -> Iterator[httpx.Client]:
    """Over TCP without a token: it reads, and changes nothing."""
    with http_client(url) as client:
        yield client
