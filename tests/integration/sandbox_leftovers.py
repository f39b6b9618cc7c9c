"""Everything that sandboxes could leave on this host, and the backends to look at."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sandboxes.protocol import Backend, Bind, SandboxSpec


def marked_spec(marker: str) -> SandboxSpec:
    """A sandbox whose processes are recognised from outside: by their mounts, or by the arguments of what starts them."""
    return SandboxSpec(binds=(Bind("/usr/share", f"/opt/{marker}"),))


def processes_marked(marker: str) -> list[int]:
    """Host pids of what belongs to sandboxes of that spec."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if marker.encode() in (process / "mountinfo").read_bytes() + (process / "cmdline").read_bytes():
                    found.append(int(process.name))
    return found


async def leftovers(backend: Backend, marker: str) -> dict[str, object]:
    """What there should be nothing of, by kind; empty when all is well."""
    entries = backend.state_dir.iterdir() if backend.state_dir.exists() else []
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(backend.state_dir) in line]
    found = {
        "listed": await backend.list(),
        "directories": [entry for entry in entries if not entry.name.startswith(".")],
        "processes": processes_marked(marker),
        "mounts": mounts,
    }
    return {kind: things for kind, things in found.items() if things}
