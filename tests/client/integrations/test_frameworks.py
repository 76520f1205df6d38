"""Frameworks: where they make it hard to count steps, and the programs of examples/ as they are.

Tests of their reports with our code in them, without, and with both.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any

import pytest

from tests.cases import cases
from tests.client.daemon_side import Folder, Ring
from tests.client.fork_server import ROOT, ForkServer
from tests.waiting import eventually

pytestmark = pytest.mark.torch

CASES = cases(__file__)
FRAMEWORKS = [name for name in CASES["examples"] if name != "plain_pytorch"]

# Return the servers of a package; ``hooks``: with the hooks, as under ``run``.
Servers = Callable[..., ForkServer]
IMPORTS = {
    "transformers": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "lightning": ("lightning.pytorch",),
}


@pytest.fixture(scope="module")
def servers(with_hooks: ForkServer, with_torch: ForkServer) -> Iterator[Servers]:
    known: dict[tuple[str, bool], ForkServer] = {}
    with ExitStack() as stack:

        def find(package: str, hooks: bool = True) -> ForkServer:
            if find_spec(package) is None:
                pytest.skip(f"needs the package {package}")
            if (package, hooks) not in known:
                server = with_hooks if hooks else with_torch
                modules = IMPORTS.get(package, (package,))
                new = server.importing(*modules, HF_HUB_OFFLINE="1")
                known[package, hooks] = stack.enter_context(closing(new))
            return known[package, hooks]

        yield find


def reported(server: ForkServer, folder: Folder, code: str) -> list[Any]:
    code = f"{CASES['preamble']}{code}\nprint(json.dumps(reported), flush=True)\nos._exit(0)"
    process = server.fork(code, environ=folder.environment(HF_HUB_OFFLINE="1"))
    output, errors = process.communicate()
    process.kill()
    assert process.returncode == 0, errors
    found: list[Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.parametrize("package", CASES["programs"])
def test_a_program_of_a_framework_reports(servers: Servers, folder: Folder, package: str) -> None:
    """Two optimizers count as one, and short steps and tokens as they are."""
    case = CASES["programs"][package]
    assert reported(servers(package), folder, case["program"]) == case["expected"]


def check(server: ForkServer, folder: Folder, name: str, *arguments: str) -> None:
    script = ROOT / "examples" / f"{name}.py"
    _, step_clock, steps, samples, tokens, names = CASES["examples"][name]
    phases = set(names.split())
    trainings = len(arguments)
    steps *= trainings

    def reported(ring: Ring) -> bool:
        known = phases <= set(ring.metadata["phases"]) and ring.metadata["step_clock"]
        # The helper thread settles the last steps.
        return bool(known) and ring.header.totals.steps >= steps

    environ = folder.environment(HF_HUB_OFFLINE="1")
    process = server.fork(
        CASES["stay"], str(script), *arguments, environ=environ, folder=folder.path
    )
    try:
        assert "trained\n" in iter(process.stdout.readline, ""), process.communicate()[1]
        ring = eventually(lambda: next(filter(reported, folder.rings()), None))
    finally:
        process.kill()
    totals = ring.header.totals
    expected = (steps, trainings * samples, trainings * tokens)
    assert (totals.steps, totals.samples, totals.tokens) == expected
    assert (ring.metadata["step_clock"], ring.metadata["faults"]) == (step_clock, 0)
    spent_ns = dict(zip(ring.metadata["phases"], totals.phases_ns, strict=False))
    assert {phase for phase, ns in spent_ns.items() if ns > 0} == phases
    assert sum(spent_ns.values()) <= totals.duration_ns


def test_an_example_reports_what_it_trains(with_torch: ForkServer, folder: Folder) -> None:
    check(with_torch, folder, "plain_pytorch", "")


@pytest.mark.loops
@pytest.mark.parametrize("example", FRAMEWORKS)
def test_a_frameworks_example_reports(servers: Servers, folder: Folder, example: str) -> None:
    """Callbacks without hooks."""
    check(servers(CASES["examples"][example][0], hooks=False), folder, example, "")


@pytest.mark.parametrize("example", FRAMEWORKS)
def test_code_and_hooks_report_same(servers: Servers, folder: Folder, example: str) -> None:
    check(servers(CASES["examples"][example][0]), folder, example, "--plain", "")
