"""The doctor's survey of a driver in a child process, and its printed findings."""

import json
import select
import signal
from collections.abc import Callable

import pytest

from tests.cases import cases
from tests.loop.preloaded import compiled
from tests.waiting import DEADLINE_S, eventually
from warpwatch_daemon.cli import doctor, main
from warpwatch_daemon.doctor import driver as driver_checks
from warpwatch_daemon.doctor import gpus, interconnect
from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_devices.nvml import survey as survey_module
from warpwatch_devices.nvml.survey import Survey

CASES = cases(__file__)


def worth_a_word(
    survey: Survey, inputs: Callable[..., CheckInputs], files: dict[str, str] | None = None
) -> dict[str, Check]:
    given = inputs(survey, files)
    groups = (driver_checks.checks, gpus.checks, interconnect.topology_checks)
    found = [check for group in groups for check in group(given)]
    return {check.name: check for check in found if check.ok is not True}


@pytest.mark.parametrize(("profile", "notes"), CASES["healthy"].items())
def test_a_healthy_gpu_of_any_model_gives_no_problem(driver, inputs, profile, notes):
    driver(profile)
    found = worth_a_word(survey_module.survey(DEADLINE_S), inputs)
    assert sorted(found) == notes
    assert all(check.ok is None for check in found.values())


def test_each_lost_stuck_or_forbidden_gpu_is_named_and_the_others_are_well(
    driver, inputs, golden_case
):
    fake = driver("h100")
    fake.set(1, unknown=1)
    fake.set(2, reset_required=1)
    fake.set(3, lost=1)
    fake.hang(STUCK_AT, gpu=4)
    fake.hang(gpu=5)
    fake.set(6, no_permission=1)
    said: list[bytes] = []
    timeouts: set[float | None] = set()

    def read_until_stuck(fd: int, timeout_s: float | None) -> bytes | None:
        """Six GPUs are done, and the one that answers up to a question has been asked that."""

        def stuck() -> bool:
            asked = fake.calls().get(4, {})
            return b"".join(said).count(b'"waiting_for":null') == 6 and STUCK_AT in asked

        timeouts.add(timeout_s)
        eventually(lambda: select.select([fd], [], [], 0.0)[0] or stuck())
        said.append(survey_module.read(fd, 0.0) or b"")
        return said[-1] or None

    survey = survey_module.survey(read=read_until_stuck)
    assert timeouts == {None, 10.0}
    assert [gpu.index for gpu in survey.up] == [0, 7]
    assert survey.gpus[4].waiting_for == "persistence_mode"
    assert survey.gpus[4].name == "NVIDIA H100 80GB HBM3"
    found = worth_a_word(survey, inputs)
    golden_case("\n".join(doctor.lines(found.values())))


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_a_driver_that_does_not_answer_at_all_is_said_to_hang(driver, inputs, function):
    driver().hang(function)
    found = worth_a_word(survey_module.survey(1.0), inputs)
    assert found["NVML"].detail == "the driver has not answered for 1 s: the kernel module hangs"


@pytest.mark.parametrize(("fault", "detail", "advice"), CASES["faults"])
def test_a_driver_that_does_not_work_in_a_container_says_what_to_do(
    driver, inputs, fault, detail, advice
):
    driver().set(**fault)
    in_container = inputs(survey_module.survey(DEADLINE_S), {"/.dockerenv": ""})
    (check,) = (c for c in driver_checks.checks(in_container) if c.name == "NVML")
    assert check.ok is False
    assert detail in check.detail
    assert advice in check.advice


def test_settings_and_faults_of_single_gpus_are_kept_apart(driver, inputs, golden_case):
    fake = driver("h100")
    fake.set(None, persistence_mode=0)
    fake.set(0, nvlinks_down=0b101, recovery_action=1)
    fake.set(1, remap_failure=1, ecc_uncorrected=3, ecc_uncorrected_aggregate=7)
    fake.set(2, temperature_c=88, throttle_reasons=0x40)
    fake.set(4, power_limit_w=500)
    fake.set(5, pcie_width=8)
    fake.set(7, fabric_state=1, compute_mode=2)
    fake.fail("nvmlGpmSampleGet", 4)
    reserved = {"/proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n"}
    found = worth_a_word(survey_module.survey(DEADLINE_S), inputs, reserved)
    golden_case("\n".join(doctor.lines(found.values())))


def test_mig_instances_are_listed_and_their_absence_too(driver, inputs):
    fake = driver("a100", gpus=2)
    fake.mig(0, "0=1g.10gb/7/0", "1=1g.10gb/8/0", "2=3g.40gb/2/0")
    fake.mig(1)
    mig = [c for c in gpus.checks(inputs(survey_module.survey(DEADLINE_S))) if c.name == "MIG"]
    assert [(check.ok, check.detail) for check in mig] == [
        (None, "GPU 1: on, but no instance: nothing can run"),
        (True, "GPU 0: on, 2 x 1g.10gb, 1 x 3g.40gb"),
    ]


def test_a_library_that_crashes_costs_the_child_alone(tmp_path, inputs, monkeypatch):
    source = tmp_path / "crash.c"
    # It crashes after more milliseconds than the survey waits for seconds.
    body = "{ (void)f; usleep(500000); __builtin_trap(); }"
    source.write_text(f"#include <unistd.h>\nint nvmlInitWithFlags(unsigned f) {body}\n")
    monkeypatch.setenv("WARPWATCH_NVML_LIBRARY", str(compiled(source, tmp_path)))
    monkeypatch.setattr(survey_module, "_EXIT_TIMEOUT_S", DEADLINE_S)
    survey = survey_module.survey(DEADLINE_S)
    assert survey.crashed_by == signal.SIGILL
    found = worth_a_word(survey, inputs)
    assert found["NVML"].detail == "the library crashed while it was asked (SIGILL)"


def test_a_survey_that_fails_is_not_called_a_hanging_driver(tmp_path, inputs, monkeypatch):
    (tmp_path / "pynvml.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = worth_a_word(survey_module.survey(DEADLINE_S), inputs)
    failure = "status 1: ImportError: broken"
    assert found["NVML"].detail == f"it was not asked: the survey ended with {failure}"


ARGUMENTS = ["--patience", str(DEADLINE_S)]
STUCK_AT = "nvmlDeviceGetPersistenceMode"


@pytest.fixture
def no_daemon(monkeypatch, tmp_path):
    monkeypatch.setenv("WARPWATCH_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("WARPWATCH_HTTP__LISTEN", "127.0.0.1:9")


@pytest.mark.usefixtures("no_daemon")
def test_json_has_every_finding_with_group_and_advice_and_the_text_a_summary(
    driver, capsys, monkeypatch
):
    driver("h100", gpus=2).set(1, lost=1)
    assert main(["doctor", "--json", *ARGUMENTS]) == 1
    found = json.loads(capsys.readouterr().out)
    assert all(set(check) == {"name", "ok", "detail", "advice", "group"} for check in found)
    assert {check["group"] for check in found} <= set(doctor.GROUPS)
    by_name = {check["name"]: check for check in found}
    assert by_name.keys() >= {"platform", "NVML", "rendezvous", "inbox", "capture store", "daemon"}
    assert by_name["platform"]["ok"] is True
    assert by_name["daemon"]["ok"] is None
    assert by_name["GPU 0"]["ok"] is True
    assert by_name["GPU 1"]["ok"] is False
    assert "power-cycle" in by_name["GPU 1"]["advice"]
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", *ARGUMENTS]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert 110 < max(map(len, lines)) <= 120
    assert lines[0].startswith("warpwatch ")
    assert [line for line in lines if line in doctor.GROUPS][:3] == ["daemon", "agent", "driver"]
    assert lines[-1].split()[1].rstrip(",") in ("problem", "problems")


@pytest.mark.usefixtures("no_daemon")
def test_without_nvml_wanted_no_driver_is_asked(monkeypatch, capsys):
    monkeypatch.setenv("WARPWATCH_SOURCES__NVML__ENABLED", "false")
    monkeypatch.setattr("warpwatch_devices.nvml.survey.survey", pytest.fail)
    code = main(["doctor", "--json", *ARGUMENTS])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["NVML"]["ok"] is None
    assert code == (1 if any(check["ok"] is False for check in checks.values()) else 0)
