"""Bad configuration is one line that names the key, the value and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from warpwatch_daemon.config import loading
from warpwatch_daemon.config.sections import Config
from warpwatch_telemetry.errors import UsageError

DOCS = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def load(tmp_path: Path, text: str, **environ: str) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return loading.load(path, environ)


def test_a_removed_key_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(tmp_path, "rendezvous: {kineto: true, owner_bytes: 5}").rendezvous.owner_bytes == 5
    assert "rendezvous.kineto is ignored: captures without the shim were removed" in caplog.text


def test_an_empty_file_and_no_file_are_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == loading.load(None, {}) == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http: {liste: x}", "http.liste: unknown key, did you mean 'listen'?"),
        ("sorces: {}", "sorces: unknown key, did you mean 'sources'?"),
        ("http: {listen: nonsense}", "not 'nonsense'"),
        ("sources: {host: {interval_s: fast}}", "interval_s: expected a number, not 'fast'"),
        ("sources: {host: {interval_s: true}}", "expected a number, not True"),
        ("sources: {simulated: {devices: true}}", "expected a whole number, not True"),
        ("sources: {simulated: {devices: 2.5}}", "expected a whole number, not 2.5"),
        ("sources: {simulated: {profile: h200}}", "expected one of h100, a100, l4, not 'h200'"),
        ("sources: {host: null}", "sources.host: expected a mapping, not None"),
        ("http: {metrics_token: 'yes'}", "expected true or false, not 'yes'"),
        ("http: {token_required: true}", "http.token_required: unknown key"),
        ("http: {token_file: 5}", "http.token_file: expected a path, not 5"),
        ("sources: {host: {interval_s: 0}}", "expected a number >= 0.1, not 0"),
        ("store: {max_bytes: 5 parsecs}", "unit 'parsecs' is none of B, KiB"),
        ("store: {url: 's3://bucket'}", "store.url: "),
        ("remote_store: {url: 's3://bucket?secret=x'}", "remote_store.url: "),
        ("remote_store: {url: 'https://bucket'}", "remote_store.url: "),
        ("detection: {hang: {timeout_s: -1}}", "detection.hang.timeout_s: "),
        ("detection: {false_alarms_per_job_day: 0}", "false_alarms_per_job_day: expected a number"),
        ("- a\n- b", "a mapping of sections is needed, found list"),
        ("a: [", "not YAML"),
        ("a: 2024-99-99", "not YAML"),
        ('a: !!int ""', "not YAML"),
        ("a: !!bool maybe", "not YAML"),
        ("a: !!timestamp x", "not YAML"),
        ("[" * 3000, "not YAML"),
        ("triggers: {arm_timeout_s: .inf}", "triggers.arm_timeout_s: "),
        ("triggers: {cooldown_s: .nan}", "triggers.cooldown_s: expected a finite number"),
        (
            "triggers: {recipes: {hangs: {}}}",
            "an anomaly kind such as 'hang', not 'hangs'",
        ),
        ("triggers: {recipes: {hang: {step: 5}}}", "recipes.hang.step: unknown key, did you mean"),
        (
            "http: {liste: x, listen: 5}\nstore: 5",
            "http.listen: expected a text, not 5 (and 2 more: warpwatch config check)",
        ),
        ('http: {"a\\nb": 1}', "http.'a\\nb': unknown key"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="No such file"):
        loading.load(Path("/nonexistent/c.yaml"), {})


def test_units_are_understood(tmp_path: Path) -> None:
    config = load(tmp_path, "store: {max_bytes: 1.5GiB, max_age: 2h}")
    assert config.store.max_bytes == 1610612736
    assert config.store.max_age == 7200


def test_numbers_may_be_written_as_texts(tmp_path: Path) -> None:
    config = load(tmp_path, "sources: {host: {interval_s: '2.5'}, simulated: {devices: '2'}}")
    assert config.sources.host.interval_s == 2.5
    assert config.sources.simulated.devices == 2
    config = load(tmp_path, "", WARPWATCH_TRIGGERS__COOLDOWN_S="1e3")
    assert config.triggers.cooldown_s == 1000


def test_what_is_shown_reads_as_what_it_was(tmp_path: Path) -> None:
    text = "{http: {token_file: /t}, triggers: {recipes: {oom: {steps: 7}}}, store: {max_age: 1w}}"
    config = load(tmp_path, text)
    shown = loading.as_tree(config)
    assert shown["http"]["token_file"] == "/t"
    assert shown["triggers"]["recipes"]["oom"]["steps"] == 7
    assert shown["store"]["max_age"] == 604800
    assert load(tmp_path, yaml.safe_dump(shown)) == config


def test_variables_come_on_top_of_the_file(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "http: {listen: '127.0.0.1:1'}",
        WARPWATCH_HTTP__LISTEN="127.0.0.1:2",
        WARPWATCH_DETECTION__HANG__TIMEOUT_S="7",
        WARPWATCH_DIR="/not/a/key",
    )
    assert config.http.listen == "127.0.0.1:2"
    assert config.detection.hang.timeout_s == 7


def test_a_variable_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown key, did you mean 'listen'"):
        load(tmp_path, "", WARPWATCH_HTTP__LISTN="x")


def test_the_documented_defaults_are_the_defaults() -> None:
    block = DOCS.read_text().split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(block) == loading.as_tree(Config())
