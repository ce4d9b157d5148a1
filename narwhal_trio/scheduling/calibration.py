"""First-token calibration: how long decode engines took to their first token, and the bound that follows. Pure: bytes in, values out.

The rule is the reference's M.4: of each group of samples the candidate is max(slowest, 1.2 x 99th percentile) + 0.5 s, and
`engine.first_token_timeout_s` must exceed the largest candidate. Below it a timeout would end requests on engines that are merely loaded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from narwhal_trio.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "Calibration",
    "FirstTokenGroup",
    "calibration_problems",
    "candidate_s",
    "dump_calibration",
    "parse_calibration",
    "percentile_99",
]

_SCHEMA: Final = "narwhal.first-token-calibration"
_VERSION: Final = 1
_KEY: Final = "engine.first_token_calibration_path"


class FirstTokenGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Samples of one pair of engines at one prompt length. Times are seconds from the dispatch of the decode leg to its first token."""

    prefill: str
    decode: str
    input_tokens: int
    samples: int
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, prefill: str, decode: str, input_tokens: int, seconds: Sequence[float]) -> FirstTokenGroup:
        return cls(
            prefill=prefill,
            decode=decode,
            input_tokens=input_tokens,
            samples=len(seconds),
            p99_s=percentile_99(seconds),
            max_s=max(seconds),
        )

    @property
    def candidate_s(self) -> float:
        return candidate_s(self.max_s, self.p99_s)


@attrs.frozen
class Calibration:
    """The measured groups of one fleet, at least one."""

    model: str
    groups: tuple[FirstTokenGroup, ...]

    @property
    def candidate_s(self) -> float:
        """What `engine.first_token_timeout_s` must exceed."""
        return max(group.candidate_s for group in self.groups)

    def document(self) -> dict[str, Any]:
        """What `/narwhal/state` shows."""
        samples = sum(group.samples for group in self.groups)
        return {"status": "reused", "candidate_s": self.candidate_s, "groups": len(self.groups), "samples": samples}


def percentile_99(seconds: Sequence[float]) -> float:
    """The sample that 99 % do not exceed: the ceil(0.99 n)-th smallest."""
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


def candidate_s(max_s: float, p99_s: float) -> float:
    return max(max_s, 1.2 * p99_s) + 0.5


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    schema_version: int
    model: str
    candidate_s: float
    groups: list[FirstTokenGroup]


def dump_calibration(calibration: Calibration) -> bytes:
    """The file's bytes, ending in a newline."""
    document = _Document(_SCHEMA, _VERSION, calibration.model, calibration.candidate_s, list(calibration.groups))
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def parse_calibration(data: bytes, source: str = "") -> Calibration:
    """Read a calibration file. source: its name, for messages. Raises `ConfigError`."""
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError([Problem(_KEY, f"{source}: {exc}")]) from None
    text = ""
    if (document.schema, document.schema_version) != (_SCHEMA, _VERSION):
        text = f"must be {_SCHEMA} version {_VERSION}, got {document.schema[:80]!r} version {document.schema_version}"
    elif not document.groups:
        text = "holds no measurement"
    elif any(
        group.samples < 1 or not 0 <= group.p99_s <= group.max_s or not math.isfinite(group.max_s)
        for group in document.groups
    ):
        text = "needs samples >= 1 and 0 <= p99_s <= max_s in every group"
    if text:
        raise ConfigError([Problem(_KEY, f"{source}: {text}")])
    return Calibration(document.model, tuple(document.groups))


def calibration_problems(
    calibration: Calibration, *, model: str, decodes: Iterable[str], first_token_timeout_s: float, source: str = ""
) -> list[Problem]:
    """Why this calibration does not vouch for a fleet. decodes: ids of its decode engines."""
    if calibration.model != model:
        return [Problem(_KEY, f"{source}: was measured with model {calibration.model!r}, not {model!r}")]
    found = []
    missing = sorted(set(decodes) - {group.decode for group in calibration.groups})
    if missing:
        found.append(Problem(_KEY, f"{source}: holds no measurement of {', '.join(missing)}"))
    if first_token_timeout_s <= calibration.candidate_s:
        text = f"must exceed {calibration.candidate_s:.3f} s, which {source} measured, got {first_token_timeout_s:g}"
        found.append(Problem("engine.first_token_timeout_s", text))
    return found
