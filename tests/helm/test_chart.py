"""The chart's objects, against tests/golden/helm: the default in full, and of all
others what differs from it.
"""

import difflib
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from tests.helm import chart, schemas
from warpwatch._version import __version__

Golden = Callable[[str, bytes], None]

VARIANTS = yaml.safe_load(Path(__file__).with_name("variants.yaml").read_text())


def rendered(helm: Path) -> dict[str, tuple[chart.Object, ...]]:
    found = {name: chart.scenario(helm, name) for name in chart.SCENARIOS}
    for values in VARIANTS["chart"]:
        found[" ".join(values)] = chart.render(helm, *chart.sets(*values))
    return found


def texts(objects: tuple[chart.Object, ...]) -> dict[str, str]:
    """Each object's YAML, without what is random or committed as a file."""
    found = {}
    for each in objects:
        if each["kind"] == "Secret":
            each = {**each, "data": dict.fromkeys(each["data"], "random")}
        elif "grafana_dashboard" in each["metadata"].get("labels", {}):
            each = {**each, "data": dict.fromkeys(each["data"], "committed")}
        elif each["kind"] == "PrometheusRule":
            each = {**each, "spec": {"groups": "committed"}}
        text = yaml.dump(each, Dumper=yaml.CSafeDumper, width=120)
        found[f"{each['kind']} {each['metadata']['name']}"] = text.replace(__version__, "VERSION")
    return found


def difference(default: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    lines = []
    for name in sorted({**default, **other}):
        before, after = (one.get(name, "").splitlines() for one in (default, other))
        changes = list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]
        if name not in other:
            lines.append(f"- without {name}")
        elif changes:
            lines += [f"# {name}", *("@@" if line.startswith("@@") else line for line in changes)]
    return lines


def test_all_values_make_what_is_committed(helm4: Path, golden: Golden) -> None:
    default = texts(chart.scenario(helm4, "default-values.yaml"))
    golden("helm/default.yaml", "---\n".join(default[name] for name in sorted(default)).encode())
    lines, first = [], dict(default)
    for name, objects in rendered(helm4).items():
        made = texts(objects)
        # Objects that the default lacks are in full where they come first.
        base = default | {key: first[key] for key in made.keys() & first.keys()}
        lines += [f"==== {name}", *difference(base, made)]
        first = made | first
    golden("helm/variants.diff", "\n".join(lines).encode())


def test_the_pods_of_another_chart_get_what_is_committed(helm4, training, golden):
    pods = [
        {
            "Pod": yaml.safe_dump(chart.pod_of(helm4, training, *values)).replace(
                __version__, "VERSION"
            )
        }
        for values in ([], ["mode=sidecar"], *VARIANTS["trainings"])
    ]
    plain, sidecar, *others = pods
    lines = [plain["Pod"], "---", sidecar["Pod"]]
    for values, pod in zip(VARIANTS["trainings"], others, strict=True):
        base = sidecar if "mode=sidecar" in values else plain
        lines += [f"==== {' '.join(values)}", *difference(base, pod)]
    golden("helm/trainings.txt", "\n".join(lines).encode())


def test_the_cluster_knows_every_field(helm4: Path) -> None:
    for name, objects in rendered(helm4).items():
        for each in objects:
            for version in chart.versions(name):
                schemas.check(each, version)


def test_helm_3_makes_what_helm_4_makes(helm3: Path, helm4: Path, training: Path) -> None:
    for name in ("fleet-kubernetes", "nonroot-shared", "sidecar"):
        older, newer = (
            texts(chart.scenario(helm, f"{name}-values.yaml")) for helm in (helm3, helm4)
        )
        assert older == newer
    for mode in ("daemonset", "sidecar"):
        older, newer = (chart.pod_of(helm, training, f"mode={mode}") for helm in (helm3, helm4))
        assert older == newer


def test_lint_has_nothing_to_say(helm3: Path, helm4: Path) -> None:
    for helm in (helm3, helm4):
        done = chart.run(helm, "lint", "--strict", str(chart.CHART))
        assert (done.returncode, "0 chart(s) failed" in done.stdout) == (0, True), done.stdout


def test_a_package_holds_dashboards_and_rules_and_no_code(helm4: Path, tmp_path: Path) -> None:
    links = chart.CHART / "dashboards"
    wanted = {path.relative_to(links) for path in links.glob("*.json")}
    wanted |= {path.relative_to(links) for path in links.glob("rules/*.yaml")}
    done = chart.run(helm4, "package", str(chart.CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("warpwatch-*.tgz")
    with tarfile.open(package) as archive:
        names = [Path(name) for name in archive.getnames()]
    inside = Path("warpwatch/dashboards")
    assert {path.relative_to(inside) for path in names if inside in path.parents} == wanted
    assert Path("warpwatch/values.schema.json") in names
    assert not [path for path in names if path.suffix == ".py" or "ci" in path.parts]
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == __version__


def test_beside_the_daemon_set_a_training_makes_nothing_but_itself(helm4, training):
    """Each release of it would have a DaemonSet else, which would fight over the node's folder."""
    objects = chart.render(helm4, "--set", "warpwatch.mode=templates", chart=training)
    assert [each["kind"] for each in objects] == ["Job"]
    made = chart.only(chart.render(helm4, chart=training), "Job")
    assert objects[0]["spec"] == made["spec"]
