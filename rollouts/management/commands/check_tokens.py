"""`manage.py check_tokens`: are the stored trajectories what was sent and sampled?"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from rollouts.models import Run
from rollouts.selectors.token_check import check_tokens


class Command(BaseCommand):
    help = "Check that every prompt of the stored trajectories extends what was sent and sampled before, and their badges."

    def add_arguments(self, parser: ArgumentParser) -> None:
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--run", type=UUID, help="Check the rollouts of this run.")
        which.add_argument("--all", action="store_true", help="Check all that is stored.")

    def handle(self, *args: Any, **options: Any) -> None:
        run = None
        if options["run"] is not None:
            run = Run.objects.filter(id=options["run"]).first()
            if run is None:
                raise CommandError(f"there is no run {options['run']}")
        badges: Counter[str] = Counter()
        calls = problems = 0
        for check in check_tokens(run):
            calls += check.calls
            if check.problem:
                problems += 1
                self.stdout.write(
                    f"{self.style.ERROR('WRONG')} rollout {check.rollout_id} attempt {check.attempt}: {check.problem}"
                )
            if check.fidelity is not None:
                badges[check.fidelity] += 1
        found = ", ".join(f"{count} {badge}" for badge, count in sorted(badges.items())) or "none"
        self.stdout.write(f"{calls} calls checked; attempts: {found}; {problems} wrong")
        if problems:
            raise SystemExit(1)
