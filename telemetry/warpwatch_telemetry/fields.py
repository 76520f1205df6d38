"""What sections are made of: types with their bounds, and the frozen section itself."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from warpwatch_daemon.config.reading import check_kind, parse_age, parse_bytes

Bytes = Annotated[int, parse_bytes, Meta(ge=0)]
Age = Annotated[float, parse_age, Meta(ge=0)]
Interval = Annotated[float, Meta(ge=0.1, le=3600)]
Timeout = Annotated[float, Meta(gt=0, le=3600)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
AnomalyKind = Annotated[str, check_kind]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds are checked by ``parse`` and ``load``, not where a section is made in Python."""


class DetectorConfig(Section, frozen=True, kw_only=True):
    enabled: bool = True
