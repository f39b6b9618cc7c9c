"""Lending a sandbox some pure Python packages of the platform's own installation."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandboxes.protocol import Bind

_TARGET = "/opt/prorl/python"


def packages_binds(names: Sequence[str]) -> tuple[Bind, ...]:
    """Read-only binds of these top-level packages. Raises ValueError for one that is not installed as a directory."""
    return tuple(Bind(str(_directory(name)), f"{_TARGET}/{name}") for name in names)


def packages_env(names: Sequence[str]) -> Mapping[str, str]:
    """The sandbox environment in which `import` finds what `packages_binds` shows."""
    return {"PYTHONPATH": _TARGET} if names else {}


def _directory(name: str) -> Path:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"no Python package {name!r} is installed here")
    return Path(next(iter(spec.submodule_search_locations)))
