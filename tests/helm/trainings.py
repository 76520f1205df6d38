"""A chart of somebody else that depends on ours, and the training pod it makes."""

from __future__ import annotations

from pathlib import Path

from tests.helm import chart, schemas

_CHART = """\
apiVersion: v2
name: training
version: 1.0.0
dependencies:
  - {name: warpwatch, version: 0.2.0, repository: "file://../warpwatch"}
"""
_JOB = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: train
spec:
  template:
    metadata:
      labels:
        warpwatch/sidecar: "true"
    spec:
      restartPolicy: Never
      initContainers:
        {{- include "warpwatch.shim.initContainer" .Subcharts.warpwatch | nindent 8 }}
        {{- if eq .Values.warpwatch.mode "sidecar" }}
        {{- include "warpwatch.sidecar.container" .Subcharts.warpwatch | nindent 8 }}
        {{- end }}
      containers:
        - name: train
          image: example.com/train:1
          env:
            {{- include "warpwatch.shim.env" .Subcharts.warpwatch | nindent 12 }}
          volumeMounts:
            {{- include "warpwatch.shim.volumeMounts" .Subcharts.warpwatch | nindent 12 }}
      volumes:
        {{- include "warpwatch.shim.volumes" .Subcharts.warpwatch | nindent 8 }}
"""


def write_chart(folder: Path) -> None:
    (folder / "templates").mkdir(parents=True)
    (folder / "charts").mkdir()
    (folder / "charts/warpwatch").symlink_to(chart.CHART)
    (folder / "Chart.yaml").write_text(_CHART)
    (folder / "templates/job.yaml").write_text(_JOB)
    (folder / "values.yaml").write_text("warpwatch:\n  mode: daemonset\n")


def pod_of(helm: Path, training: Path, *values: str) -> chart.Object:
    sets = [argument for value in values for argument in ("--set", f"warpwatch.{value}")]
    objects = chart.render(helm, *sets, chart=training)
    job = chart.only(objects, "Job")
    schemas.check(job, chart.VERSIONS[0])
    spec: chart.Object = job["spec"]["template"]["spec"]
    return spec


def mounts_of(container: chart.Object) -> dict[str, chart.Object]:
    return {each["name"]: each for each in container["volumeMounts"]}
