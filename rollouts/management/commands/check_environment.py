"""`manage.py check_environment NAME`: does an environment keep its promises on real tasks?"""

from __future__ import annotations

import asyncio
import json
import tempfile
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import connection

from rollouts.environments.conformance import NoSandbox, check_environment
from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment, ValidationFailed
from rollouts.models import Task
from rollouts.services.errors import Refused
from rollouts.services.registry import check_config
from sandboxes.images.services.use import Usable, resolve_image
from sandboxes.network import open_network
from sandboxes.protocol import SandboxSpec, Session
from sandboxes.registry import get_backend


class Command(BaseCommand):
    help = "Check an environment: the gold solution scores 1, an empty answer 0, a crash while scoring gives null."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="Handler name, as in the entry point group prorl.environments.")
        parser.add_argument("--tasks", type=Path, help="JSON lines of task payloads; default: stored tasks of this handler.")
        parser.add_argument("--config", default="{}", help="The environment's configuration, as JSON.")
        parser.add_argument("--limit", type=int, default=20, help="Check at most this many tasks (default 20).")

    def handle(self, *args: Any, **options: Any) -> None:
        tasks = self._tasks(options["name"], options["tasks"], options["limit"])
        try:
            config = json.loads(options["config"])
            check_config(handler=options["name"], config=config)
            results = asyncio.run(check_environment(options["name"], config, tasks, open_sandbox=_sandbox))
        except json.JSONDecodeError as error:
            raise CommandError(f"--config is not JSON: {error}") from error
        except (UnknownEnvironment, BrokenEnvironment, ValidationFailed, NoSandbox) as error:
            raise CommandError(str(error)) from error
        except Refused as refused:
            raise CommandError("; ".join(f"{error.pointer}: {error.detail}" for error in refused.errors)) from refused
        for result in results:
            mark = self.style.SUCCESS("ok    ") if result.passed else self.style.ERROR("FAILED")
            self.stdout.write(f"{mark} {result.task}: {result.check}" + (f" ({result.detail})" if result.detail else ""))
        failed = sum(not result.passed for result in results)
        self.stdout.write(f"{len(results) - failed} passed, {failed} failed")
        if failed:
            raise SystemExit(1)

    def _tasks(self, name: str, file: Path | None, limit: int) -> list[dict[str, Any]]:
        if file is None:
            stored = Task.objects.filter(dataset__environment__handler=name, quarantine_reason="")
            tasks = list(stored.order_by("id").values_list("payload", flat=True)[:limit])
        else:
            try:
                tasks = [json.loads(line) for line in file.read_text().splitlines()[:limit] if line.strip()]
            except (OSError, json.JSONDecodeError) as error:
                raise CommandError(f"--tasks {file}: {error}") from error
        if not tasks:
            raise CommandError(f"There are no tasks for {name}: name a file with --tasks, or load a dataset first.")
        return tasks


def _resolve(image: str) -> Usable:
    """In a thread, whose connection nobody else would close."""
    try:
        return resolve_image(image)
    finally:
        connection.close()


@asynccontextmanager
async def _sandbox(spec: SandboxSpec) -> AsyncIterator[Session]:
    """A sandbox for one check, in a directory of its own."""
    image = await asyncio.to_thread(_resolve, spec.image)
    with tempfile.TemporaryDirectory() as folder:
        backend = get_backend(settings.SANDBOX_BACKEND, Path(folder), settings.SANDBOX_OPTIONS)
        try:
            await backend.start("check-environment", spec, image.root)
            session = await backend.connect("check-environment")
            await open_network(session, spec.network, on_refusal=lambda _: None)
            yield session
            await session.close()
        finally:
            await backend.stop("check-environment")
