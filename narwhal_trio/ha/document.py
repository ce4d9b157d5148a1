"""The lease record as a JSON document, `narwhal.router-lease`: the same in a file and in etcd."""

from __future__ import annotations

import math
from typing import Final

import attrs
import msgspec

from narwhal_trio.ha.lease import Lease, LeaseUnavailable

__all__ = ["SCHEMA", "decode_lease", "encode_lease"]

SCHEMA: Final = "narwhal.router-lease"
SCHEMA_VERSION: Final = 1
MAX_EPOCH: Final = 2**53
"""Largest epoch taken for one: JSON readers agree on integers up to here."""


class _Document(msgspec.Struct):
    schema: str
    schema_version: int
    epoch: int
    holder: str
    expires_at: float
    updated_at: float
    revision: int = 0


def encode_lease(lease: Lease) -> bytes:
    document = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **attrs.asdict(lease)}
    return msgspec.json.encode(document) + b"\n"


def decode_lease(data: bytes, where: str) -> Lease:
    """where: names the record in messages. Raises `LeaseUnavailable` for anything that is no lease."""
    try:
        found = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise LeaseUnavailable(f"{where} is not a {SCHEMA} document: {exc}") from None
    if (found.schema, found.schema_version) != (SCHEMA, SCHEMA_VERSION):
        what = f"{found.schema!r} version {found.schema_version}"
        raise LeaseUnavailable(f"{where} is {what}, not {SCHEMA} version {SCHEMA_VERSION}")
    if not 1 <= found.epoch <= MAX_EPOCH or not found.holder or not math.isfinite(found.expires_at - found.updated_at):
        raise LeaseUnavailable(f"{where} is not a valid lease: epoch {found.epoch}, holder {found.holder!r}")
    return Lease(found.epoch, found.holder, found.expires_at, found.updated_at, found.revision)
