"""vLLM's error answers: their envelope, and the wording of the validation that FastAPI and pydantic do for it."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError", "bad_request", "field_error", "parameter_error", "validation_error"]


class ApiError(Exception):
    """An error answer of the engine. `envelope` is the object under `error`."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.envelope: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": status}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.envelope}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, "BadRequestError", param)


def parameter_error(message: str, param: str, value: Any = None, *, show_value: bool = True) -> ApiError:
    """An error about one sampling parameter, with the suffix that vLLM adds."""
    suffix = f"parameter={param}, value={value}" if show_value else f"parameter={param}"
    return bad_request(f"{message} ({suffix})", param)


def validation_error(problems: list[dict[str, Any]]) -> ApiError:
    """An error about the shape of the body: all problems at once, `param` names the first."""
    plural = "s" if len(problems) != 1 else ""
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ApiError(400, f"{len(problems)} validation error{plural}:{lines}", "Bad Request", problems[0]["loc"])


def field_error(kind: str, name: str, message: str, value: Any, **context: Any) -> dict[str, Any]:
    """One problem of a field as pydantic reports it and vLLM prints it."""
    loc = f"body.{name}" if name else "body"
    problem: dict[str, Any] = {"type": kind, "loc": loc, "msg": message, "input": shown(value)}
    if context:
        problem["ctx"] = context
    return problem


def shown(value: Any) -> str:
    """An input value as vLLM prints it: containers by size only."""
    if isinstance(value, dict):
        return f"<dict of {len(value)} items>"
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    return value if isinstance(value, str) else str(value)
