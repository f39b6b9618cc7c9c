"""Files of /proc that tell of the whole machine, or act on it, whatever namespaces a process is in. No Django."""

from __future__ import annotations

from pathlib import Path

# Some can be read by anybody, and all of them by root.
_NAMES = ("cmdline", "kcore", "key-users", "keys", "latency_stats", "sched_debug", "sysrq-trigger", "timer_list")


def kernel_files() -> list[str]:
    """Paths of those that this host has: in sandboxes something else is shown there."""
    return [path for path in (f"/proc/{name}" for name in _NAMES) if Path(path).exists()]
