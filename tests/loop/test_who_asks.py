"""Users against each other's jobs, over loopback and on the socket of a real daemon."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.other_users import OWNER, STRANGER, command, held_connections, open_folder, request
from tests.loop.programs import STEPPING
from tests.waiting import DEADLINE_S
from warpwatch_daemon.demo.processes import free_port

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

JOB = "stepping"
STACKS = {"job": JOB, "kind": "stacks"}
TOKEN = "correct horse"
DAEMON = ("-m", "warpwatch_daemon", "daemon", "--config")


@pytest.fixture(scope="module")
def node() -> Iterator[LoopNode]:
    """A daemon of root without configuration of access, and a training of OWNER."""
    # On a busy machine the training itself would be captured.
    with open_folder() as folder, loop_node(folder, triggers={"dry_run": True}) as node:
        node.start_daemon()
        start_training(node)
        yield node


def start_training(node: LoopNode) -> None:
    node.start_rank(0, STEPPING, "0.02", str(OWNER), world_size=1)
    node.have_trained(JOB, 1, 1)


def api_socket(node: LoopNode) -> Path:
    return node.folder / "run-api" / "api.sock"


def session(node: LoopNode, uid: int) -> str:
    _, text = request(uid, api_socket(node), "/api/v1/sessions", {})
    answer = httpx.get(node.url + json.loads(text)["path"], timeout=DEADLINE_S)
    return answer.headers["set-cookie"].partition(";")[0]


def stored_stacks(node: LoopNode) -> str:
    """The path of the API of a file that the newest capture has brought."""

    def written() -> Any:
        captures = node.get("captures")
        return captures and captures[-1]["outcome"] == "complete" and captures

    capture = poll(written, "the stacks are stored")[-1]
    return f"/api/v1/captures/{capture['id']}/rank0.stacks.json"


def test_a_stranger_gets_no_stacks_of_anothers_job_over_loopback(node):
    before = node.get("captures")
    status, text = request(STRANGER, node.port, "/api/v1/captures", STACKS)
    assert (status, json.loads(text)["error"]["reason"]) == (401, "token_needed")
    assert node.get("captures") == before


def test_a_stranger_sees_and_captures_only_their_own_on_the_socket(node):
    before = node.get("captures")
    assert poll(lambda: node.get("runs"), "the run is known")
    for part in ("ranks", "jobs", "captures", "diagnoses", "runs"):
        assert request(STRANGER, api_socket(node), f"/api/v1/{part}") == (200, f'{{"{part}":[]}}\n')
    status, text = request(STRANGER, api_socket(node), "/api/v1/captures", STACKS)
    assert (status, json.loads(text)["error"]["reason"]) == (404, "refused_no_rank")
    assert text.endswith('running jobs: none"}}\n')
    alerts: dict[str, Any] = {"alerts": [{"status": "firing", "labels": {"training_job": JOB}}]}
    assert request(STRANGER, api_socket(node), "/api/v1/alertmanager", alerts)[0] == 403
    assert node.get("captures") == before


def test_a_stranger_with_a_job_of_the_same_name_does_not_get_it_for_anothers(open_path):
    with loop_node(open_path) as node:
        node.start_daemon()
        start_training(node)
        node.start_rank(1, STEPPING, "0.02", str(STRANGER), world_size=2)
        node.have_trained(JOB, 2, 1)
        asked = STACKS | {"owner": f"uid/{OWNER}"}
        status, text = request(STRANGER, api_socket(node), "/api/v1/captures", asked)
        assert (status, json.loads(text)["error"]["reason"]) == (404, "refused_no_rank")
        asked = STACKS | {"owner": f"uid/{STRANGER}"}
        assert request(STRANGER, api_socket(node), "/api/v1/captures", asked)[0] == 202
        assert {one["request"]["owner"] for one in node.get("captures")} == {f"uid/{STRANGER}"}


def test_the_owner_captures_on_the_socket_and_no_one_else_reads_it(node):
    done = command(OWNER, node.run_dir, "capture", "--kind", "stacks", "--wait")
    assert done.returncode == 0, done.stderr
    assert "complete 1/1" in done.stdout
    path = stored_stacks(node)
    sessions = {uid: {"Cookie": session(node, uid)} for uid in (OWNER, STRANGER)}
    for uid, status in ((OWNER, 200), (STRANGER, 404)):
        assert request(uid, api_socket(node), path)[0] == status
        assert request(uid, node.port, path, headers=sessions[uid])[0] == status
        assert request(uid, node.port, path)[0] == 401
    asked = request(STRANGER, node.port, "/api/v1/captures", headers=sessions[STRANGER])
    assert asked == (200, '{"captures":[]}\n')
    assert JOB not in request(STRANGER, node.port, "/", headers=sessions[STRANGER])[1]
    assert JOB in request(OWNER, node.port, "/", headers=sessions[OWNER])[1]
    shown = command(STRANGER, node.run_dir, "status", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["ranks"] == []


def test_of_the_store_itself_other_users_read_nothing(node):
    assert node.http.post("/api/v1/captures", json=STACKS).status_code == 202
    stored_stacks(node)
    store = node.folder / "captures"
    poll(lambda: list(store.glob("*/*/*/*/rank0.stacks.json")), "the file")
    modes = {path: path.stat().st_mode & 0o777 for path in (store, *store.rglob("*"))}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_daemon_lives_without_its_port_and_takes_it_when_it_is_free(open_path):
    """Between two lives of the daemon, a stranger takes the port."""
    with loop_node(open_path) as node:
        with socket.create_server(("127.0.0.1", node.port)):
            node.start_daemon()
            start_training(node)
            done = command(OWNER, node.run_dir, "capture", "--kind", "stacks", "--wait")
            assert done.returncode == 0, done.stderr
            assert node.metric("warpwatch_http_up") == 0
            required = node.start("required", [*DAEMON, str(node.config), "--require-http"], {})
            assert required.wait(DEADLINE_S) in (2, 3)
        poll(
            lambda: httpx.get(f"{node.url}/healthz", timeout=DEADLINE_S).status_code == 200,
            "it has its port",
        )
        poll(lambda: node.metric("warpwatch_http_up") == 1, "it says so")


def test_connections_that_never_read_keep_no_probe_from_its_answer(open_path):
    probes = free_port()
    with loop_node(open_path, http={"probe_listen": f"127.0.0.1:{probes}"}) as node:
        node.start_daemon()
        with held_connections(0, node.port, 127), held_connections(STRANGER, node.port, 127):
            assert request(OWNER, node.port, "/healthz")[0] == 200
            for _ in range(10):
                assert request(OWNER, probes, "/healthz")[0] == 200
            assert request(OWNER, probes, "/readyz")[0] == 200
            assert request(OWNER, probes, "/metrics")[0] == 404


def test_a_socket_in_a_folder_of_someone_else_is_not_asked(open_path):
    folder = open_path / "run-api"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as trap:
        trap.bind(str(folder / "api.sock"))
        trap.listen()
        os.chown(folder, STRANGER, STRANGER)
        done = command(OWNER, open_path / "run", "status", "--url", "http://127.0.0.1:9")
        assert "no daemon answers at http://127.0.0.1:9" in done.stderr
        done = command(OWNER, open_path / "run", "status")
        assert "no daemon answers at http://127.0.0.1:9400" in done.stderr
