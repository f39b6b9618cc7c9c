"""How the tests start Debian's Chromium."""

from __future__ import annotations

from ctypes.util import find_library
from pathlib import Path
from typing import Any

PROGRAM = Path("/usr/bin/chromium")

# The background ones would only try to reach hosts that tests must not reach.
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def launch_options() -> dict[str, Any]:
    """For Playwright's `chromium.launch`."""
    return {"executable_path": str(PROGRAM), "args": _FLAGS, "headless": True}


def why_missing() -> str:
    """What keeps Chromium from being used, or an empty string."""
    if not PROGRAM.exists():
        return "Chromium is not installed (Debian package chromium)"
    if not find_library("atomic"):
        return "Playwright's driver needs libatomic.so.1 (Debian package libatomic1)"
    return ""
