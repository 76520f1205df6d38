"""The chart as an OCI image layout, as registries keep charts, and the digest of a layout's image.

Usage: chart.py digest LAYOUT; chart.py layout CHART.tgz LAYOUT
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import yaml

# https://helm.sh/docs/topics/registries/#helm-chart-manifest
_CONFIG = "application/vnd.cncf.helm.config.v1+json"
_CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def digest_of(layout: Path) -> str:
    """Return the digest of the only image, or index of images, in the layout."""
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    return str(entry["digest"])


def write_layout(chart: Path, layout: Path) -> None:
    with tarfile.open(chart) as files:
        text = files.extractfile("warpwatch/Chart.yaml")
        assert text is not None
        about = yaml.safe_load(text)
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _add(blobs, _CONFIG, _json(about)),
        "layers": [_add(blobs, _CONTENT, chart.read_bytes())],
        "annotations": {
            "org.opencontainers.image.title": about["name"],
            "org.opencontainers.image.version": about["version"],
        },
    }
    entry = _add(blobs, _MANIFEST, _json(manifest))
    entry["annotations"] = {"org.opencontainers.image.ref.name": about["version"]}
    (layout / "index.json").write_bytes(_json({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))


def _add(blobs: Path, media_type: str, content: bytes) -> dict[str, Any]:
    """Write a blob and return its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    (blobs / digest).write_bytes(content)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


if __name__ == "__main__":
    if sys.argv[1] == "digest":
        print(digest_of(Path(sys.argv[2])))
    else:
        write_layout(Path(sys.argv[2]), Path(sys.argv[3]))
