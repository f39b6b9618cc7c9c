"""`manage.py work STAGE`: one worker process."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from rollouts.engine.errors import StoreFailed
from rollouts.lifecycle import Stage


class Command(BaseCommand):
    help = "Carry out one stage of rollouts on this node until SIGTERM."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("stage", choices=[stage.value for stage in Stage])
        parser.add_argument("--concurrency", type=int, default=16, help="Rollouts worked on at once (default 16).")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["concurrency"] < 1:
            raise CommandError("--concurrency must be at least 1.")
        from rollouts.worker.celery_worker import serve

        try:
            sys.exit(serve(stage=Stage(options["stage"]), node=settings.NODE, concurrency=options["concurrency"]))
        except StoreFailed as error:
            raise CommandError(f"The database does not answer: {error}") from error
