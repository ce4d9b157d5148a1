"""What a file may hold beyond keys and values, resolved before the check: comments, null sections, old names, references."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Final

from narwhal_trio.config.control import EngineContract
from narwhal_trio.config.errors import Problem, join
from narwhal_trio.config.keys import FieldSpec, field_specs, section_of

__all__ = ["Prepare", "TableWithDuplicates"]

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OLD_CONTRACT_NAMES: Final = types.MappingProxyType(
    {
        "vllm_version": "engine_version",
        "nixl_version": "transfer_version",
        "nixl_connector_version": "connector_version",
    }
)


class TableWithDuplicates(dict[str, Any]):
    """A JSON object that remembers which of its keys appear more than once. Give the class to `json.loads` as `object_pairs_hook`."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        super().__init__()
        self.duplicates: list[str] = []
        for name, value in pairs:
            if name in self and name not in self.duplicates:
                self.duplicates.append(name)
            self[name] = value


class Prepare:
    """One pass over the tables of a file, guided by the section classes.

    found: the problems. unresolved: paths of values that still hold a reference, about which the check has nothing to add.
    """

    def __init__(self, environ: Mapping[str, str], *, comments: bool) -> None:
        self.environ = environ
        self.comments = comments
        self.found: list[Problem] = []
        self.unresolved: set[str] = set()

    def table(self, cls: type, raw: Mapping[str, object], path: str) -> dict[str, Any]:
        """A copy of one table with everything resolved. What is wrong in itself is left in place for the check."""
        for name in getattr(raw, "duplicates", ()):
            if not self._comment(name):
                self.found.append(Problem(join(path, name), "appears more than once"))
        members = {str(name): value for name, value in raw.items() if not self._comment(str(name))}
        if cls is EngineContract:
            self._rename(members, path)
        specs = {spec.name: spec for spec in field_specs(cls)}
        return {
            name: self._value(specs[name], value, join(path, name)) if name in specs else value
            for name, value in members.items()
            if not (name in specs and value is None and _defaults_on_null(specs[name]))
        }

    def _comment(self, name: str) -> bool:
        return self.comments and name.startswith("_")

    def _rename(self, members: dict[str, Any], path: str) -> None:
        for old, new in _OLD_CONTRACT_NAMES.items():
            if old in members:
                if new in members:
                    self.found.append(Problem(join(path, old), f"is the old name of {new}, which is given too"))
                members.setdefault(new, members.pop(old))

    def _value(self, spec: FieldSpec, value: object, path: str) -> Any:
        cls, mark = section_of(spec.type)
        if cls is not None and not mark and isinstance(value, Mapping):
            return self.table(cls, value, path)
        if isinstance(value, list | tuple) and (mark or spec.key.env):
            return tuple(self._item(cls, spec, item, f"{path}[{index}]") for index, item in enumerate(value))
        return self._resolve(value, path) if spec.key.env else value

    def _item(self, cls: type | None, spec: FieldSpec, value: object, path: str) -> Any:
        if cls is not None and isinstance(value, Mapping):
            return self.table(cls, value, path)
        return self._resolve(value, path) if spec.key.env else value

    def _resolve(self, value: object, path: str) -> Any:
        """The variable's content for a whole-string `${NAME}`; anything without a reference as it is."""
        if not isinstance(value, str) or "${" not in value:
            return value
        match = _REFERENCE.fullmatch(value)
        content = self.environ.get(match[1], "") if match else ""
        if match is None:
            text = "an environment reference must be the whole value, ${NAME}"
        elif not content.strip():
            text = f"environment variable {match[1]} is unset or empty"
        elif "${" in content:
            text = f"environment variable {match[1]} contains another reference"
        else:
            return content
        self.found.append(Problem(path, text))
        self.unresolved.add(path)
        return value


def _defaults_on_null(spec: FieldSpec) -> bool:
    """True for a section that may be null in JSON to mean its defaults."""
    cls, mark = section_of(spec.type)
    return cls is not None and not mark and not spec.required and typing.get_origin(spec.type) is not types.UnionType
