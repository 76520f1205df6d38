"""The image as it runs: any user, only its volumes writable, no capability, 96 MiB."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm import chart
from tests.image import containers
from tests.image.conftest import Start
from tests.loop.node import poll

pytestmark = pytest.mark.deploy

UID = 12345
LIMIT = ("--memory", "96m", "--memory-swap", "96m")
SIMULATED = ("--env", "WARPWATCH_SOURCES__SIMULATED__ENABLED=true")
TOKEN = "Authorization: Bearer secret"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For daemon and ranks, under the same name in a container: 1777 as an emptyDir's is."""
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    yield shared
    shutil.rmtree(shared, ignore_errors=True)


def wait_for(container: containers.Container) -> None:
    poll(container.answers, "a healthy container")


def test_it_runs_as_nobody_in_particular_and_says_what_it_is(image: str) -> None:
    config = containers.inspect("image", image)["Config"]
    found = [config[name] for name in ("User", "Entrypoint", "Cmd")]
    assert found == ["65532:65532", ["warpwatch"], ["daemon"]]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == "warpwatch"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_any_user_scrapes_the_golden_series(start, golden):
    container = start(*LIMIT, *SIMULATED, "--user", str(UID))
    wait_for(container)
    poll(lambda: "warpwatch_device_power_watts" in container.fetch("/metrics")[1], "GPUs")
    page = container.fetch("/metrics")[1]
    # Disks and networks differ between machines; a simulated GPU is always the same.
    series = {line.rpartition(" ")[0] for line in page.splitlines() if line[0] != "#"}
    ours = sorted(each for each in series if 'gpu="0"' in each or "source_up{" in each)
    golden("image.prom", ("\n".join(ours) + "\n").encode())
    assert container.running


def test_its_only_door_is_its_port_and_its_own_checks_work_without_a_shell(start, image, helm4):
    container = start(*LIMIT, *SIMULATED, "--user", str(UID))
    wait_for(container)
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in container.execute("cat", f"/proc/net/{table}").splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                listening.add(int(local.rpartition(":")[2], 16))
    assert listening == {9400}
    assert container.execute("ls", "/sys/class/net").split() == ["lo"]
    (pip,) = container.execute(
        "python3", "-c", "import importlib.util as u; print(u.find_spec('pip'))"
    ).split()
    assert pip == "None"
    how, *command = containers.inspect("image", image)["Healthcheck"]["Test"]
    assert how == "CMD"
    container.execute(*command)
    # The request of `helm test`.
    (pod,) = [each for each in chart.render(helm4) if each["kind"] == "Pod"]
    (tester,) = pod["spec"]["containers"]
    script, url = tester["args"]
    assert (tester["command"], url) == (
        ["python3", "-c"], "http://warpwatch-peers.monitoring.svc:9400",
    )  # fmt: skip
    own = "http://127.0.0.1:9400"
    said = container.execute("python3", "-c", script, own)
    assert 'warpwatch_source_up{source="simulated"} 1' in said
    with pytest.raises(AssertionError, match="/metrics lacks"):
        container.execute("python3", "-c", script.replace("build_info", "no_such"), own)


def test_a_capture_is_stored_and_its_diagnosis_lacks_memory(start: Start, folder: Path) -> None:
    """A daemon that has no more than 96 MiB says so, and lives on."""
    (folder / "token").write_text("secret\n")
    environment = {"WARPWATCH_DIR": f"{folder}/run", "WARPWATCH_INBOX": f"{folder}/inbox"}
    options = [f"--env={name}={value}" for name, value in environment.items()]
    options += [f"--volume={folder}:{folder}", f"--env=WARPWATCH_HTTP__TOKEN_FILE={folder}/token"]
    container = start(*LIMIT, *SIMULATED, *options, "--user", str(UID))
    wait_for(container)
    trainer = start_torch(folder, environment)
    try:
        poll(lambda: container.get("/api/v1/ranks?job=train")["ranks"], "a rank")
        asked = json.dumps({"job": "train", "steps": 2})
        path, how = "/api/v1/captures", "Content-Type: application/json"
        assert container.fetch(path, asked, how, "Authorization: Bearer wrong")[0] == 401
        status, text = container.fetch(path, asked, how, TOKEN)
        assert status == 202, text
        identifier = json.loads(text)["id"]
        poll(lambda: container.get(f"{path}/{identifier}")["outcome"], "an outcome")
        capture = container.get(f"{path}/{identifier}")
    finally:
        trainer.kill()
        trainer.wait()
    assert capture["outcome"] == "no_memory"
    (trace,) = [name for name in capture["files"] if name.endswith(".pt.trace.json.gz")]
    stored = f"/var/lib/warpwatch/captures/{identifier[:4]}/{identifier[4:6]}/{identifier[6:8]}"
    assert trace in container.execute("ls", f"{stored}/{identifier}").split()
    assert container.answers()


def start_torch(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    program = (
        "import time, torch, warpwatch as w; m = w.attach(job='train')\n"
        "while True:\n"
        " with m.step(): torch.ones(64, 64) @ torch.ones(64, 64); time.sleep(0.02)\n"
    )
    with open(folder / "train.log", "wb") as log:
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)


def test_root_without_capabilities_serves_two_tenants_that_see_only_themselves(start, folder):
    """As in the DaemonSet: the folders are the host's, each pod mounts one of its own."""
    run, data = folder / "run", folder / "data"
    for path in (run, data):
        path.mkdir(mode=0o755)
    options = [f"--volume={run}:/run/warpwatch", f"--volume={data}:/var/lib/warpwatch"]
    daemon = start(*LIMIT, *SIMULATED, *options, "--user", "0:0")
    wait_for(daemon)
    tenants = {"first": (str(uuid.uuid4()), "10001"), "second": (str(uuid.uuid4()), "10002")}
    pods = {job: start_tenant(start, run, data, job, *who) for job, who in tenants.items()}

    def jobs() -> set[str]:
        return {rank["job"] for rank in daemon.get("/api/v1/ranks")["ranks"] if rank["step"] > 10}

    poll(lambda: jobs() == set(tenants), "both ranks")
    for job, pod in pods.items():
        assert pod.running
        other = next(uid for name, (uid, _) in tenants.items() if name != job)
        assert other not in pod.log()
        daemon.execute("warpwatch", "capture", "--job", job, "--kind", "stacks")
    written = {"first": ["written"], "second": ["written"]}
    poll(lambda: states_of(daemon) == written, f"stacks of both: {daemon.log()}")


def test_without_root_it_serves_a_folder_of_its_own_below_the_kubelets(start, folder, helm4):
    """An emptyDir is root's, and of the pod's group: the daemon may write it and never owns it."""
    spec = chart.only(chart.render(helm4, "--set", "nonRoot=true"), "DaemonSet")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = chart.environment(container)
    options = [f"--env={name}={variables[name]}" for name in ("WARPWATCH_DIR", "WARPWATCH_INBOX")]
    for name, target in (("run", "/run/warpwatch"), ("data", "/var/lib/warpwatch")):
        path = folder / name
        path.mkdir()
        os.chown(path, 0, 65532)
        path.chmod(0o2777)
        options += [f"--volume={path}:{target}"]
    daemon = start(*LIMIT, *SIMULATED, *options, "--user", "65532:65532")
    wait_for(daemon)
    assert (folder / "run/pod").stat().st_uid == 65532


def states_of(daemon: containers.Container) -> dict[str, list[str]]:
    captures = daemon.get("/api/v1/captures")["captures"]
    return {each["request"]["job"]: [r["state"] for r in each["ranks"]] for each in captures}


def start_tenant(
    start: Start, run: Path, data: Path, job: str, uid: str, user: str
) -> containers.Container:
    """The kubelet makes a pod's folders with the mode of the one above."""
    options = ["--user", user, "--env", f"JOB={job}", "--env", f"WARPWATCH_POD_UID={uid}"]
    for path, target in ((run, "/run/warpwatch"), (data / "inbox", "/var/lib/warpwatch/inbox")):
        own = path / "pods" / uid
        own.mkdir(mode=0o700, parents=True)
        options += [f"--volume={own}:{target}"]
    program = Path(__file__).with_name("training.py")
    options += [f"--volume={program}:/training.py:ro", "--entrypoint", "python3"]
    options += ["--env", "PYTHONPATH=/opt/warpwatch/client"]
    return start(*options, arguments=("/training.py",))


def test_an_init_container_brings_the_shim(start: Start, folder: Path) -> None:
    options = ("--user", "65532", "--memory", "32m", f"--volume={folder}:/opt/warpwatch-shim")
    container = start(*options, arguments=("shim", "/opt/warpwatch-shim"))
    assert container.wait() == 0, container.log()
    bootstrap = folder / "warpwatch/bootstrap"
    assert container.log().strip() == "/opt/warpwatch-shim/warpwatch/bootstrap"
    assert (bootstrap / "sitecustomize.py").is_file()
    assert os.stat(bootstrap).st_mode & 0o555 == 0o555
