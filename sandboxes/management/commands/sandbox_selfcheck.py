"""`manage.py sandbox_selfcheck BACKEND`: does this host keep the contract of sandboxes?"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from sandboxes.errors import BackendUnavailable
from sandboxes.registry import get_backend
from sandboxes.selfcheck.report import run_and_print


class Command(BaseCommand):
    help = "Run the conformance suite of a sandbox backend on this host; exit 1 when a check fails."
    requires_system_checks = ()  # so that it runs without a database

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("backend", help="name of the backend, for instance bubblewrap")
        parser.add_argument("--json", action="store_true", dest="as_json", help="one JSON object per check")

    def handle(self, *args: Any, backend: str, as_json: bool, **options: Any) -> None:
        parent = Path(settings.SANDBOX_DIR)
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A leading dot keeps the directory out of the platform's own list of sandboxes.
        with tempfile.TemporaryDirectory(prefix=".selfcheck-", dir=parent) as state_dir:
            try:
                passed = asyncio.run(self._run(backend, Path(state_dir), as_json))
            except BackendUnavailable as error:
                raise CommandError(str(error)) from None
        if not passed:
            sys.exit(1)

    async def _run(self, name: str, state_dir: Path, as_json: bool) -> bool:
        # The check of the full network runs whether or not this node permits it to environments.
        backend = get_backend(name, state_dir, dataclasses.replace(settings.SANDBOX_OPTIONS, full_network=True))
        await backend.probe()
        return await run_and_print(backend, self.stdout.write, as_json=as_json)
