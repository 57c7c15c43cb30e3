"""How many threads the team has: the CPUs that this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import ConfigError
from . import _native

CGROUP = Path("/sys/fs/cgroup")


def _read_numbers(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """CPUs that the cgroup's quota amounts to (a container's --cpus), or None without one."""
    match _read_numbers(cgroup / "cpu.max"):
        case [quota, period] if quota != "max":
            return int(quota) / int(period)
    quota_us = _read_numbers(cgroup / "cpu" / "cpu.cfs_quota_us")
    period_us = _read_numbers(cgroup / "cpu" / "cpu.cfs_period_us")
    if quota_us and period_us and int(quota_us[0]) > 0:
        return int(quota_us[0]) / int(period_us[0])
    return None


def available_cpus() -> int:
    """CPUs in the affinity mask, cut by the cgroup's quota; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = cpu_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def set_threads(threads: int | None) -> int:
    """Size the process-wide team and return its size. Raises ConfigError."""
    if threads is not None and not 1 <= threads <= 1024:
        raise ConfigError("threads", threads, "1 to 1024")
    count = available_cpus() if threads is None else threads
    _native.set_num_threads(count)
    return count
