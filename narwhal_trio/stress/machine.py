"""What the operating system says about processes: CPU time, memory, descriptors. Linux's /proc; elsewhere these figures are missing."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import msgspec

__all__ = ["Usage", "usage_of"]

_PROC = Path("/proc")


class Usage(msgspec.Struct):
    """Of one process and its descendants, since they began.

    cpu_s: user and system. starved_s: how long the thread that worked most could have run but had no processor, because others had
    it. rss_mib: resident memory. descriptors: open ones, sockets included.
    """

    cpu_s: float
    starved_s: float
    rss_mib: float
    descriptors: int
    processes: int


def usage_of(pid: int) -> Usage | None:
    """None if there is no such process (any more), or no /proc."""
    cpu = rss = descriptors = count = 0
    threads: list[tuple[int, int]] = []
    for each in _tree(pid):
        folder = _PROC / str(each)
        try:
            # The name in the second field may hold anything; what follows its last ")" is plain.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            for task in (folder / "task").iterdir():
                ran_ns, waited_ns, _ = map(int, (task / "schedstat").read_text().split())
                threads.append((ran_ns, waited_ns))
            opened = len(os.listdir(folder / "fd"))  # noqa: PTH208 - names only, and there may be thousands
        except OSError:
            continue
        cpu += int(fields[11]) + int(fields[12])
        rss += int(fields[21]) * resource.getpagesize()
        descriptors += opened
        count += 1
    if not count:
        return None
    return Usage(
        cpu / os.sysconf("SC_CLK_TCK"), round(max(threads)[1] / 1e9, 3), round(rss / 2**20, 1), descriptors, count
    )


def _tree(pid: int) -> list[int]:
    found, queue = [], [pid]
    while queue:
        each = queue.pop()
        found.append(each)
        try:
            for task in (_PROC / str(each) / "task").iterdir():
                queue += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found
