"""This host and its settings."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings as site
from django.core import checks

from prorl_site.checks import TAG

from .report import Finding, fail, ok, warn

_LEAST_FREE_BYTES = 2 * 1024**3
_SHORTEST_SECRET = 32


def python() -> Iterator[Finding]:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.release()}"
    if sys.platform != "linux":
        yield fail("machine", found, "Sandboxes need Linux. Run workers on a Linux host.")
    else:
        yield ok("machine", found)


def settings() -> Iterator[Finding]:
    """What Django's system checks of this project say (prorl_site/checks.py), and what is only a matter of safety."""
    problems = checks.run_checks(tags=[TAG])
    for problem in problems:
        finding = fail if problem.is_serious() else warn
        yield finding("settings", problem.msg, problem.hint or "")
    if site.DEBUG:
        yield warn("settings", "PRORL_DEBUG is on: errors show settings and code to whoever causes them", "Unset PRORL_DEBUG.")
    if not site.DEBUG and len(site.SECRET_KEY) < _SHORTEST_SECRET:
        yield warn(
            "settings",
            f"PRORL_SECRET_KEY has {len(site.SECRET_KEY)} characters; sessions can be forged by guessing it",
            f"Use at least {_SHORTEST_SECRET} random characters, best in a file named by PRORL_SECRET_KEY_FILE.",
        )
    if "*" in site.ALLOWED_HOSTS:
        yield warn("settings", "every Host header is accepted", "List the names of this site in PRORL_ALLOWED_HOSTS.")
    if not problems:
        yield ok("settings", f"lease {site.LEASE_SECONDS:g} s, heartbeat {site.HEARTBEAT_SECONDS:g} s, node {site.NODE}")


def files() -> Iterator[Finding]:
    for name in ("VAR_DIR", "SANDBOX_DIR", "IMAGE_DIR"):
        yield _folder(f"PRORL_{name}", Path(getattr(site, name)))


def _folder(name: str, folder: Path) -> Finding:
    while not folder.exists():  # workers make it
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return fail("storage", f"{folder} cannot be written: {error.strerror}", f"Free or open it, or point {name} elsewhere.")
    free = shutil.disk_usage(folder).free
    found = f"{name}: {folder} has {free / 1024**3:.1f} GB free"
    if free < _LEAST_FREE_BYTES:
        return warn("storage", found, f"Make room, or point {name} at a larger disk.")
    return ok("storage", found)
