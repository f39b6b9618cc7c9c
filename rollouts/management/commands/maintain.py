"""`manage.py maintain`: the maintenance worker."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = "Build images and prune them, on this node, until SIGTERM."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--builds", type=int, default=2, help="Images built at once (default 2).")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["builds"] < 1:
            raise CommandError("--builds must be at least 1.")
        from rollouts.worker.maintenance import serve

        sys.exit(serve(node=settings.NODE, builds=options["builds"]))
