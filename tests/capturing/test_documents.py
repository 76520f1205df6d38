"""Documents of a child that was taken over by the file it read."""

import errno
import json
import resource
from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon.captures.capture_node import read_here
from warpwatch_capturing import child, confinement, store, verification
from warpwatch_capturing.confinement import Ended, OpenedFile
from warpwatch_capturing.store import read_diagnosis
from warpwatch_capturing.verification import Expectation, TraceVerdict, verify

WELL = {"verdict": "healthy", "findings": [{"kind": "healthy", "share": 0.1}], "traces": []}


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"verdict": "healthy", "more": ' + b"[" * 50 + b"]" * 50 + b"}",
        b'{"verdict": "healthy", "findings": "x"}',
        b'{"verdict": "healthy", "findings": [{"kind": "io", "share": 1e300}]}',
        b'{"verdict": "healthy", "traces": [{"roofline": {"mfu_ratio": "1"}}]}',
        b'{"verdict": 7}',
        b"\xff",
    ],
)
def test_a_diagnosis_that_is_not_of_its_form_is_none(tmp_path, content):
    (tmp_path / "diagnosis.json").write_bytes(content)
    assert read_diagnosis(tmp_path) is None


def test_a_diagnosis_that_is_too_long_is_none(tmp_path, monkeypatch):
    content = json.dumps(WELL)
    (tmp_path / "diagnosis.json").write_text(content)
    monkeypatch.setattr(store, "MAX_DIAGNOSIS_BYTES", len(content))
    assert read_diagnosis(tmp_path) == WELL
    monkeypatch.setattr(store, "MAX_DIAGNOSIS_BYTES", len(content) - 1)
    assert read_diagnosis(tmp_path) is None


def test_texts_of_a_diagnosis_are_cleaned(tmp_path):
    document = WELL | {"summary": "\x1b[2J", "extra": {"\n": "kept"}}
    (tmp_path / "diagnosis.json").write_text(json.dumps(document))
    assert read_diagnosis(tmp_path) == WELL | {"summary": " [2J", "extra": {" ": "kept"}}


REFUSED = (None, ("unreadable: exit status 0",))


@pytest.mark.parametrize(
    ("line", "verdict"),
    [('[3, ["no step 7"]]', (3, ("no step 7",))), ("[" * 100_000, REFUSED), ("[1]", REFUSED)]
    + [(line, REFUSED) for line in ('["1", []]', "[-1, []]", '[1, "x"]', "")],
)
def test_a_verdict_on_a_trace_that_is_not_of_its_form_is_refused(tmp_path, line, verdict):
    found = verify(tmp_path, {"t": Expectation(0)}, run=lambda *given: Ended(0, (line,)))
    assert found == {"t": TraceVerdict(*verdict)}


def close(given: Any) -> None:
    """Close files as their readers do."""
    for one in given:
        if isinstance(one, OpenedFile):
            one.open("rb").close()
        elif isinstance(one, list):
            close(one)


def test_a_reader_without_memory_says_so(tmp_path, monkeypatch):
    def lacks(*given: Any) -> None:
        close(given)
        raise MemoryError

    (tmp_path / "t").write_text("{}")
    monkeypatch.setattr(verification, "take_inventory", lacks)
    found = verify(tmp_path, {"t": Expectation(0)}, run=read_here)
    assert found == {"t": TraceVerdict(None, ("unreadable: it takes more than 512 MiB",))}
    monkeypatch.setattr("warpwatch_diagnosis.stacks.diagnose_stacks", lacks)
    assert child.diagnose("stacks", tmp_path, ["t"], {}, run=read_here) == "no_memory"


def test_what_a_child_is_given_goes_to_the_diagnosis_of_its_kind(tmp_path, monkeypatch):
    told: list[Any] = []

    def telling(name: str, found: object) -> None:
        def tell(*given: object) -> object:
            close(given)
            told.append(given)
            return found

        monkeypatch.setattr(f"warpwatch_diagnosis.{name}", tell)

    made = SimpleNamespace(to_json=dict, measures=[SimpleNamespace(file="a.json")])
    for name, found in (
        ("stacks.diagnose_stacks", {}), ("memory_growth.diagnose_memory", {}),
        ("diagnosis.diagnose", made), ("report.html.render_html", "<p>"),
        ("measures.reduction.pack", b"packed"),
    ):  # fmt: skip
        telling(name, found)
    monkeypatch.setattr(child, "memory_left", lambda: 1 << 30)
    for name, mebibytes in (("a.json", 1), ("well.json", 2)):
        (tmp_path / name).write_bytes(bytes(mebibytes << 20))

    def run(module: str, arguments: Any, timeout_s: float, fds: Any) -> Ended:
        return Ended(child.main(arguments, confine=lambda *limits: told.append(limits)), ())

    late = {"kind": "latency_regression", "rank": 3, "begin_step": None, "ratio": None}
    for kind, asked in (
        ("stacks", late), ("stacks", late | {"kind": "hang"}), ("memory", None), ("torch", late)
    ):  # fmt: skip
        well = [tmp_path / "well.json"] if kind == "torch" else []
        about: Any = ({1: "late"}, well, {0: "gpu-1"}, asked, run)
        assert child.diagnose(kind, tmp_path, ["a.json"], *about) == "ok"
    said = [
        repr([[*map(str, one)] if isinstance(one, list) else one for one in given])
        for given in told
    ]
    limits, about = f"[{1 << 30}, 30]", "[['a.json'], {1: 'late'}, {0: 'gpu-1'}"
    assert said[:6] == [
        limits,
        f"{about}, 3]",
        limits,
        f"{about}, None]",
        limits,
        "[['a.json'], {0: 'gpu-1'}]",
    ]
    anomaly = f"RequestingAnomaly({', '.join(f'{name}={value!r}' for name, value in late.items())})"
    files = "[['a.json'], ['well.json'], {1: 'late'}, {0: 'gpu-1'}"
    assert said[6:8] == [f"[{1 << 30}, 60]", f"{files}, {anomaly}]"]
    written = [(tmp_path / name).read_bytes() for name in child.made_of("torch", ["a.json"])]
    assert written == [b"{}", b"<p>", b"packed"]


def test_a_child_gives_up_what_it_can_and_says_what_it_cannot(monkeypatch, capsys):
    told: list[object] = []
    monkeypatch.setattr("resource.setrlimit", lambda *given: told.append(given))
    for name in ("nice", "setgroups"):
        monkeypatch.setattr(f"os.{name}", lambda given, name=name: told.append((name, given)))
    for name, number in (("geteuid", 0), ("getpid", 10_000_007)):
        monkeypatch.setattr(f"os.{name}", lambda number=number: number)

    def become(uid: int) -> None:
        told.append(uid)
        if uid != 65534:
            raise OSError(errno.EINVAL, "no such user here")

    def deny_system_calls() -> None:
        raise OSError(errno.EINVAL, "no filter")

    monkeypatch.setattr(confinement, "_become", become)
    monkeypatch.setattr(confinement, "deny_system_calls", deny_system_calls)
    for capabilities in (0xC0, 0xE0):
        monkeypatch.setattr(confinement, "_capabilities", lambda found=capabilities: found)
        confinement.confine(5, 7)
    limits = [
        (resource.RLIMIT_CPU, (7, 8)), (resource.RLIMIT_AS, (5, 5)),
        (resource.RLIMIT_FSIZE, (16 << 20, 16 << 20)), (resource.RLIMIT_CORE, (0, 0)), ("nice", 10),
    ]  # fmt: skip
    assert told == [*limits, *limits, ("setgroups", []), 1_900_000_007, 65534]
    assert capsys.readouterr().out == 2 * "unconfined: deny_system_calls: no filter\n"
