"""`manage.py prune`: what the dispatcher does every hour, now; or only the numbers, with `--dry-run`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rollouts.services.retention import count_prunable, prune


class Command(BaseCommand):
    help = "Remove what is older than projects keep it, and blobs that nothing refers to."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="Only say how much would go.")

    def handle(self, *args: Any, dry_run: bool, **options: Any) -> None:
        if dry_run:
            for kind, count in count_prunable().items():
                self.stdout.write(f"{count:>10,}  {kind} would go")
            return
        done = prune(seconds_for_each_kind=float("inf"))
        for pruned in done:
            self.stdout.write(f"{pruned.removed:>10,}  {pruned.kind} gone")
        if failed := [pruned for pruned in done if pruned.error]:
            raise CommandError("; ".join(f"{pruned.kind}: {pruned.error}" for pruned in failed))
