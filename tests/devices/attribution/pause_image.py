"""A container image with one program that does nothing, made without a registry."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

IMAGE = "localhost/pause:1"
_SOURCE = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"


def write_pause_image(folder: Path) -> Path:
    """The image as `docker save` writes it; needs a C compiler that can link statically."""
    layer = _layer_with(_program(folder))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    path = folder / "pause.tar"
    with tarfile.open(path, "w") as archive:
        _add(archive, "config.json", json.dumps(config).encode())
        _add(archive, "layer.tar", layer)
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    return path


def _program(folder: Path) -> Path:
    source, program = folder / "pause.c", folder / "pause"
    source.write_text(_SOURCE)
    subprocess.run(["cc", "-static", "-o", str(program), str(source)], check=True)
    return program


def _layer_with(program: Path) -> bytes:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.add(program, "pause")
    return layer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
