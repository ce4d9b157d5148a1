"""The limit of open files: every connection needs one."""

from __future__ import annotations

import resource

__all__ = ["file_limit", "raise_file_limit"]

_UNLIMITED = 1 << 30


def file_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, for the whole process; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            pass  # macOS knows limits that getrlimit does not show
    return file_limit()
