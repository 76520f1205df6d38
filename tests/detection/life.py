"""The register of anomalies, without detectors: it is fed what they would say."""

import json
import re
from collections.abc import Iterable
from typing import Any

from tests.detection.streams import EPOCH_S
from tests.golden_lines import line
from warpwatch_detection.anomalies.register import AnomalyRegister, Change
from warpwatch_detection.config import AnomaliesConfig
from warpwatch_detection.detector import Cleared, DetectorResult
from warpwatch_detection.ranks import LiveRank, RankDevices
from warpwatch_telemetry.anomalies import Anomaly, Detected
from warpwatch_telemetry.jobs import JobId

LLAMA = JobId("", "llama", "")


class Life:
    """A register, fed with what detectors of a job of eight ranks on eight devices would say."""

    def __init__(self, **config: Any) -> None:
        self.rank_devices = RankDevices(
            {LLAMA: {rank: LiveRank(device=f"GPU-{rank}") for rank in range(8)}}
        )
        self.register = AnomalyRegister(AnomaliesConfig(**config), self.rank_devices)
        self.changes: list[Anomaly] = []

    def found(self, kind: str, at: float, summary: str = "", **about: Any) -> list[Anomaly]:
        whole: dict[str, Any] = {} if "device" in about else {"job": "llama"}
        whole |= {"severity": "warning", "summary": summary or kind.replace("_", " ")} | about
        return self.apply(kind, Detected(EPOCH_S + at, **whole))

    def fine(self, kind: str, at: float, job: str = "", **about: Any) -> list[Anomaly]:
        if job:
            about["job_id"] = JobId("", job, "")
        return self.apply(kind, Cleared(EPOCH_S + at, **about or {"job_id": LLAMA}))

    def apply(self, kind: str, result: DetectorResult) -> list[Anomaly]:
        return self._changed(self.register.apply([(kind, result)]))

    def _changed(self, changes: Iterable[Change]) -> list[Anomaly]:
        anomalies = [change.anomaly for change in changes]
        self.changes += anomalies
        return anomalies

    def tell(self, story: str) -> None:
        """As "0 straggler 3; 5 hang; 9 xid GPU-3 critical 79; 60 fine hang; 700 expire; 9 end".

        After the seconds and kind come rank or device, severity and value, each if there is one,
        and other fields as "step=7", with "_" for a space. "only" has the kinds that go on.
        """
        for part in story.split("; "):
            at, kind, *rest = part.split()
            about: dict[str, Any] = {}
            for word in rest[1:] if kind == "fine" else rest:
                name, is_field, text = word.partition("=")
                if is_field:
                    number = re.fullmatch(r"-?[\d.]+", text)
                    about[name] = json.loads(text) if number else text.replace("_", " ")
                elif word.startswith("GPU-"):
                    about["device"] = word
                elif word.isdigit():
                    about["value" if "severity" in about else "rank"] = int(word)
                else:
                    about["severity"] = word
            if kind == "fine":
                self.fine(rest[0], float(at), **about)
            elif kind == "only":
                self._changed(
                    self.register.end_other_kinds(set(rest), EPOCH_S + float(at), ", anew")
                )
            elif kind == "expire":
                self._changed(self.register.expire(EPOCH_S + float(at)))
            elif kind == "end":
                self._changed(self.register.end_job(LLAMA, EPOCH_S + float(at)))
            else:
                self.found(kind, float(at), **about)

    def story(self) -> str:
        """Return a line for each change, what is explained, and what has ended."""
        register = self.register
        lines = [line("change", one) for one in self.changes]
        lines += [line("explained", one) for one in register.state.suppressed.values()]
        lines += [
            f"{effect} by {cause}: {n}\n"
            for (effect, cause), n in sorted(register.suppressed_counts.items())
        ]
        lines.append(f"ended {[one.id for one in register.history]}, refused {register.refused}\n")
        return "".join(lines)

    @property
    def active(self) -> list[tuple[str, int | None]]:
        return [(one.kind, one.rank) for one in self.register.active]
