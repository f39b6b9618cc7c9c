"""Sandbox backends by name. No Django."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sandboxes.backends.apptainer.backend import ApptainerBackend
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.none import NoBackend
from sandboxes.errors import BackendUnavailable
from sandboxes.options import NodeOptions
from sandboxes.protocol import Backend

_BACKENDS: dict[str, Callable[[Path, NodeOptions | None], Backend]] = {
    backend.name: backend for backend in (ApptainerBackend, BubblewrapBackend, NoBackend)
}


def backend_names() -> list[str]:
    """Of all backends, whether or not this host can run them."""
    return sorted(_BACKENDS)


def get_backend(name: str, state_dir: Path, options: NodeOptions | None = None) -> Backend:
    """The backend called `name`, keeping its files below `state_dir`. Raises BackendUnavailable for an unknown name."""
    if name not in _BACKENDS:
        raise BackendUnavailable(f"unknown sandbox backend {name!r}; known: {', '.join(backend_names())}")
    return _BACKENDS[name](state_dir, options)
