"""The reference table of the configuration, made from the same metadata that the check uses."""

from __future__ import annotations

import enum
import types
import typing
from typing import TYPE_CHECKING, Any

import attrs

from narwhal_trio.config.keys import FieldSpec, field_specs, section_of
from narwhal_trio.config.model import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KeyDoc", "describe"]


@attrs.frozen
class KeyDoc:
    """One row. default: JSON-ready, None also where `required`. env: a whole-string `${NAME}` works in files."""

    key: str
    type: str
    default: object
    required: bool
    unit: str
    rule: str
    doc: str
    env: bool


def describe() -> list[KeyDoc]:
    """Every key as a dotted path, `engines[].url`, in the order of the sections."""
    return list(_rows(RouterConfig, ""))


def _rows(cls: type, path: str) -> Iterator[KeyDoc]:
    for spec in field_specs(cls):
        dotted = f"{path}.{spec.name}" if path else spec.name
        inner, mark = section_of(spec.type)
        if inner is not None:
            yield from _rows(inner, dotted + mark)
        else:
            yield _row(spec, dotted)


def _row(spec: FieldSpec, dotted: str) -> KeyDoc:
    return KeyDoc(
        key=dotted,
        type=_type_name(spec.type),
        default=None if spec.required else _plain(spec.default if spec.key.default is None else spec.key.default),
        required=spec.required,
        unit=spec.key.unit,
        rule=spec.key.rule.text if spec.key.rule is not None else "",
        doc=spec.key.doc,
        env=spec.key.env,
    )


def _plain(value: Any) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _type_name(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return " or ".join("null" if arg is type(None) else _type_name(arg) for arg in args)
    if origin is tuple:
        return f"list of {_type_name(args[0])}s"
    if origin is typing.Literal:
        return " or ".join(f'"{choice}"' for choice in args)
    if issubclass(kind, enum.Enum):
        return " or ".join(f'"{member.value}"' for member in kind)
    return {bool: "boolean", int: "integer", float: "number", str: "string"}[kind]
