"""A training that takes its steps on request, and the captures of it."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

from tests.cases import cases
from tests.client.daemon_side import Folder, program
from tests.client.fork_server import Forked, ForkServer
from tests.waiting import DEADLINE_S, eventually

PARTS = cases(__file__)
# With it, the program can profile itself.
PROFILES: str = PARTS["profiles"]


class Training:
    """``number`` is that of the next step."""

    def __init__(self, folder: Folder, process: Forked | subprocess.Popen[str]) -> None:
        self.folder = folder
        self.process = process
        self._read()

    def _read(self) -> None:
        assert self.process.stdout is not None
        assert select([self.process.stdout], [], [], DEADLINE_S)[0], "it does not return"
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.number = int(line)

    def request(self, steps: int, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([steps, text]) + "\n")
        self.process.stdin.flush()

    def steps(self, steps: int = 1, inside: str = "") -> None:
        self.request(steps, inside)
        self._read()

    def end(self) -> None:
        errors = self.process.communicate("null\n", timeout=DEADLINE_S)[1]
        assert (self.process.returncode, "Traceback" in errors) == (0, False), errors

    def accept_commands(self) -> None:
        self.folder.command(self.folder.ring().name, op="none")
        self.steps(1, PARTS["has_commands"])

    def capture(self, id: str = "c-1", start: int = 0, steps: int = 2, **more: Any) -> int:
        """Ask for a capture from the step after the next one on, or ``start``. Return its start."""
        start = start or self.number + 2
        fields = {"op": "capture", "id": id, "kind": "torch", "arm_timeout_s": 3600, **more}
        self.folder.command(self.folder.ring().name, start_step=start, steps=steps, **fields)
        return start

    def cancel(self, id: str) -> None:
        self.folder.command(self.folder.ring().name, op="cancel", id=id)

    def record(self, id: str = "c-1", **more: Any) -> None:
        """Have a capture recording that does not end by itself soon."""
        self.capture(id, steps=100, **more)
        self.steps(5)
        self.event("capture_started", id)

    def events(self, id: str = "c-1") -> list[dict[str, Any]]:
        return [found for found in self.folder.ring().events if found.get("id") == id]

    def names(self, id: str = "c-1") -> list[str]:
        return [str(found["event"]) for found in self.events(id)]

    def event(self, name: str, id: str = "c-1") -> dict[str, Any]:
        """The event ``name`` of the capture, once it was reported."""

        def find() -> dict[str, Any] | None:
            return next((found for found in self.events(id) if found["event"] == name), None)

        return eventually(find, lambda: f"no {name} of {id}: {self.folder.ring().events}")

    def detail(self, id: str = "c-1", event: str = "capture_failed") -> str:
        return str(self.event(event, id)["detail"])

    def handed_over(self, id: str = "c-1") -> Path:
        """The trace's file in the inbox, by the token of the answer."""
        token = self.event("capture_finished", id)["token"]
        (path,) = (self.folder.path / "inbox").glob(f"{id}.*.{token}.pt.trace.json.gz")
        return path

    def captured(self, id: str = "c-1") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(gzip.decompress(self.handed_over(id).read_bytes()))
        return found

    def stacks(self, id: str) -> dict[str, Any]:
        """Ask for stacks, and return what the helper thread has written."""
        self.capture(id, kind="stacks", start=1, steps=1)
        token = self.event("capture_finished", id)["token"]
        name = f"{id}.{self.folder.ring().name}.{token}.stacks.json"
        found: dict[str, Any] = json.loads((self.folder.path / "inbox" / name).read_text())
        return found

    def works(self, id: str = "after") -> None:
        self.capture(id)
        self.steps(6)
        assert "aten::addmm" in names(self.captured(id))

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.folder.path / "inbox").iterdir())


def names(trace: dict[str, Any]) -> set[str]:
    return {found.get("name", "") for found in trace["traceEvents"]}


@contextmanager
def training(
    folder: Folder,
    server: ForkServer | None = None,
    /,
    define: str = "",
    main: str = "serve()",
    **environ: str,
) -> Iterator[Training]:
    """A training with torch where there is a server to fork it."""
    define = PARTS["torch"] + define if server else define
    code = PARTS["program"].replace("{define}", define).replace("{main}", main)
    with program(folder, code, python=server or sys.executable, **environ) as process:
        found = Training(folder, process)
        found.accept_commands()
        yield found
