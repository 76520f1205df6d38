"""Configuration: how a file is read, what a mistake is answered, and the page that explains it."""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cases import cases
from warpwatch_capturing.config import TriggersConfig
from warpwatch_capturing.policy import Disk, Policy
from warpwatch_daemon.cli import main
from warpwatch_daemon.config import Config, ConfigWatch, Reloading
from warpwatch_daemon.demo.story import FAULTS
from warpwatch_fleet.config import FleetFile
from warpwatch_runtime import loading
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_serving.config import url_of
from warpwatch_telemetry.errors import UsageError

CASES = cases(__file__)

DOCS = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def load(tmp_path: Path, text: str, **environ: str) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return loading.load(Config, path, environ)


def test_an_empty_file_and_no_file_are_the_defaults_that_are_documented(tmp_path):
    assert load(tmp_path, "") == loading.load(Config, None, {}) == Config()
    block = DOCS.read_text().split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(block) == loading.as_tree(Config())


def test_a_server_is_reached_where_it_listens():
    assert {listen: url_of(listen) for listen in CASES["reached"]} == CASES["reached"]


def test_a_reload_swaps_the_triggers_and_says_each_time_what_needs_a_restart(tmp_path, caplog):
    config, metrics = load(tmp_path, ""), AgentMetrics()
    policy = Policy(config.triggers, Disk(tmp_path))
    reloading = Reloading(config, tmp_path / "c.yaml", {}, policy, metrics)
    changed = "triggers: {dry_run: true}\nhttp: {listen: '127.0.0.1:1'}\n"
    for text in (changed, changed, "triggers: 5"):
        (tmp_path / "c.yaml").write_text(text)
        reloading.advance()
        reloading.request()
        reloading.advance()
        assert policy.config.dry_run
    told, again, wrong = (one for one in caplog.messages if "reloaded" not in one)
    assert told == again == "changes of http need a restart"
    assert wrong.startswith("reload failed, old configuration kept: ")
    value = partial(metrics.registry.get_sample_value, "warpwatch_config_reloads_total")
    assert [value({"result": result}) for result in ("ok", "failed")] == [2, 1]


def changed(tree: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration that differ from those of ``before``."""
    return {
        key: changed(value, before[key]) if isinstance(value, dict) and before.get(key) else value
        for key, value in (dict.fromkeys(before, "removed") | tree).items()
        if value != before.get(key, ...)
    }


def test_what_a_file_and_variables_make_of_the_defaults_is_golden(tmp_path, caplog, golden_case):
    lines, defaults = list[str](), loading.as_tree(Config())
    for text, environ in CASES["loaded"]:
        caplog.clear()
        found = changed(loading.as_tree(load(tmp_path, text, **environ)), defaults)
        variables = (f"{name}={value}" for name, value in environ.items())
        lines += [text, *variables, "=>", *caplog.messages, yaml.safe_dump(found)]
    golden_case("\n".join(lines).replace(str(tmp_path), ""))
    names = "c.yaml, WARPWATCH_HTTP__LISTN: http.listn: unknown key, did you mean 'listen'"
    with pytest.raises(UsageError, match=names):
        load(tmp_path, "", WARPWATCH_HTTP__LISTN="x")


def test_a_mistake_is_named(tmp_path, golden_case):
    lines = []
    for text, said in (*CASES["by_schema"], *CASES["mistakes"], ("[" * 1000, "not YAML")):
        with pytest.raises(UsageError) as caught:
            load(tmp_path, text)
        line = str(caught.value).replace(str(tmp_path), "")
        assert said in line and "\n" not in line
        # The rest is the YAML parser's own, and may change with it.
        line = line.partition(" YAML: ")[0]
        lines.append(f"{text.strip()[:99]!r}\n    {line}\n")
    golden_case("".join(lines))


@pytest.fixture
def schema(capsys):
    assert main(["config", "schema"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_schema_takes_what_the_daemon_takes_and_refuses_what_it_refuses(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(loading.as_tree(Config()))
    assert validator.is_valid({"store": {"max_bytes": "1.5GiB", "max_age": "2h"}})
    off = yaml.safe_load("attribution: {slurm: off}")
    assert validator.is_valid(off)
    assert loading.parse(Config, off, "the test").attribution.slurm == "off"
    refused = [yaml.safe_load(text) for text, _ in CASES["by_schema"]]
    assert [validator.is_valid(tree) for tree in refused] == [False] * 5


def test_a_check_prints_a_line_for_each_mistake(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text(f"http: {{token_file: {file}, web_config: /none.yml}}")
    assert main(["config", "check", str(file)]) == 0
    absent = "not readable here: http.web_config /none.yml"
    assert capsys.readouterr().out == f"{file}: valid; {absent}\n"
    file.write_text("http: {listen: '127.0.0.1:9401'}")
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: valid\n"
    assert main(["config", "check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True}
    file.write_text("http: {liste: x}\nstore: {max_age: 3 moons}\ntriggers: {dry: 5}\nfleet: {a}")
    assert main(["config", "check", str(file)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: http.liste: unknown key, did you mean 'listen'?",
        f"{file}: triggers.dry: unknown key, did you mean 'dry_run'?",
        f"{file}: store.max_age: unit 'moons' is none of s, m, h, d, w, not '3 moons'",
        f"{file}: fleet.a: unknown key",
    ]
    assert main(["config", "check", str(file), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["valid"] is False
    assert len(said["errors"]) == 4
    assert main(["config", "check", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: there is no such file" in capsys.readouterr().err
    with pytest.raises(UsageError, match="No such file"):
        loading.load(Config, tmp_path / "none.yaml", {})


def keys(tree: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def explained() -> list[str]:
    """Return the keys of the table's first column; ``.b`` after ``a.c`` is ``a.b``."""
    found: list[str] = []
    for cell in re.findall(r"^\| (`.*?`) \|", DOCS.read_text(), flags=re.M):
        for name in re.findall(r"`([^`]+)`", cell):
            whole = found[-1].rpartition(".")[0] + name if name.startswith(".") else name
            one_of = re.search(r"\{(.*)\}", whole)
            names = one_of[1].split(",") if one_of else [""]
            found += [re.sub(r"\{.*\}", each, whole.replace("<kind>", "*")) for each in names]
    return found


def stands_for(name: str, key: str) -> bool:
    """A section's row stands for its keys."""
    return fnmatchcase(key, name) or key.startswith(f"{name}.")


def test_every_key_is_explained_and_none_that_is_gone():
    there, names = list(keys(loading.as_tree(Config()))), explained()
    assert [key for key in there if not any(stands_for(name, key) for name in names)] == []
    # The keys of the fleet are its own, and explained there.
    of_agent = Config.model_fields.keys() - {"fleet"}
    own = [name for name in names if name.split(".")[0] in of_agent]
    assert [name for name in own if not any(stands_for(name, key) for key in there)] == []


def test_the_default_and_the_bounds_of_each_key_are_golden(golden_case):
    """Also of keys that a list or mapping has, which the documented defaults lack."""
    left_out = {"title", "description", "type", "$ref", "items"}
    sections: dict[str, Any] = {}
    for model in (Config, FleetFile):
        sections |= model.model_json_schema()["$defs"]
    lines = []
    for name, section in sorted(sections.items()):
        for key, about in section.get("properties", {}).items():
            facts = {fact: value for fact, value in about.items() if fact not in left_out}
            lines.append(f"{name}.{key}: {json.dumps(facts)}\n")
    golden_case("".join(lines))


def publish(folder: Path, version: str, content: str) -> None:
    """As the kubelet does: a new folder, and a link to it that is exchanged in one go."""
    (folder / version).mkdir()
    (folder / version / "warpwatch.yaml").write_text(content)
    link = folder / "..data_tmp"
    link.symlink_to(version)
    link.rename(folder / "..data")


def test_only_new_content_is_a_change_and_only_once(tmp_path):
    file = tmp_path / "warpwatch.yaml"
    file.symlink_to("..data/warpwatch.yaml")
    publish(tmp_path, "..1", "triggers: {dry_run: false}")
    watch = ConfigWatch(file)
    assert not watch.changed()
    publish(tmp_path, "..2", "triggers: {dry_run: false}")
    assert not watch.changed()
    publish(tmp_path, "..3", "triggers: {dry_run: true}")
    assert [watch.changed(), watch.changed()] == [True, False]
    # A file that is missing for a moment does not count as a change.
    file.unlink()
    assert not watch.changed()
    file.write_text("triggers: {dry_run: true}")
    assert not watch.changed()


def test_the_demo_expects_the_captures_of_the_built_in_recipes():
    recipes = TriggersConfig().recipes
    found = {fault.anomaly: fault.capture for fault in FAULTS.values() if fault.anomaly}
    assert found == {kind: recipes[kind].kind for kind in found}
