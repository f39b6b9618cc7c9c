"""`python -m sandboxes.selfcheck BACKEND STATE_DIR`: the suite without Django, for any interpreter and any user."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sandboxes.options import NodeOptions
from sandboxes.registry import get_backend
from sandboxes.selfcheck.report import run_and_print

if __name__ == "__main__":
    name, state_dir = sys.argv[1:]
    backend = get_backend(name, Path(state_dir), NodeOptions(full_network=True))
    sys.exit(not asyncio.run(run_and_print(backend, print, as_json=True)))
