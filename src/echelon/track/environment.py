"""Facts about this machine, read without importing torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CPU_NAME = re.compile(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", re.MULTILINE)
_CGROUP = Path("/sys/fs/cgroup")


def environment(folder: Path | None = None) -> dict[str, Any]:
    """Return the facts that a run's results depend on; disk space is that of `folder`."""
    return {
        "python": platform.python_version(),
        "echelon": package_version("echelon"),
        "torch": package_version("torch"),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory": memory_bytes(),
        "disk_free": shutil.disk_usage(existing(folder or Path())).free,
        "os": os_name(),
        "host": platform.node(),
    }


def package_version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # 50 ms: only when asked

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    found = _CPU_NAME.search(_read(Path("/proc/cpuinfo")))
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the cores this process may use, by its affinity and its container's quota."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota()
    return max(1, min(seen or 1, round(quota) if quota else sys.maxsize))


def cpu_quota() -> float | None:
    """Return the cores that the container's CPU quota grants; None without a quota."""
    parts = _read(_CGROUP / "cpu.max").split()
    if len(parts) != 2 or parts[0] == "max":
        return None
    return int(parts[0]) / int(parts[1])


def memory_bytes() -> int:
    """Return the memory this process may use: all, or the container's limit if smaller."""
    total = meminfo().get("MemTotal", 0) or _sysconf_memory()
    limit = _read(_CGROUP / "memory.max").strip()
    return min(total, int(limit)) if limit.isdecimal() else total


def memory_free() -> int:
    """Return the memory that is available without swapping."""
    free = meminfo().get("MemAvailable", memory_bytes())
    used = _read(_CGROUP / "memory.current").strip()
    limit = _read(_CGROUP / "memory.max").strip()
    if used.isdecimal() and limit.isdecimal():
        free = min(free, int(limit) - int(used))
    return free


def meminfo() -> dict[str, int]:
    """Return /proc/meminfo in bytes; empty on systems without it."""
    return dict(_meminfo_rows(_read(Path("/proc/meminfo"))))


def os_name() -> str:
    pretty = re.search(r'^PRETTY_NAME="?([^"\n]+)', _read(Path("/etc/os-release")), re.MULTILINE)
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"{pretty.group(1)} ({kernel})" if pretty else kernel


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _meminfo_rows(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        parts = rest.split()
        if len(parts) == 2 and parts[1] == "kB":
            yield key, int(parts[0]) * 1024


def _sysconf_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: Path) -> str:
    """Return the text of a system file; empty if there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
