"""A PostgreSQL that can be crashed and started again on its data."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from prorl_site.embedded.postgres import EmbeddedPostgres

_GONE_SECONDS = 10.0


class CrashingPostgres(EmbeddedPostgres):
    """Durable, unlike the one that the other tests share: what it has confirmed must still be there after a crash."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(data_dir, durable=True)

    def crash(self) -> None:
        """SIGKILL to the postmaster, as the kernel does when memory runs out; its children notice and end."""
        assert self._process is not None, "it does not run"
        postmaster = int((self._data / "postmaster.pid").read_text().split("\n", 1)[0])
        os.kill(postmaster, signal.SIGKILL)
        assert self._process.wait(_GONE_SECONDS), "the postmaster survived SIGKILL"
        self._process.kill()
