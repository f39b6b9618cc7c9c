"""`manage.py rescore ID`: score a finished rollout, or a run's, again."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from rollouts.lifecycle import Cause
from rollouts.models import Environment, Project, Rollout, Run
from rollouts.services.errors import Refused
from rollouts.services.rescore import rescore_rollout, rescore_run


class Command(BaseCommand):
    help = "Queue a finished rollout, or all of a run that can be scored, to be scored again by EVAL workers."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("id", type=UUID, help="Of a run or a rollout.")
        parser.add_argument("--environment", default="", help="NAME@VERSION to score with instead of each rollout's own.")
        parser.add_argument(
            "--only-cause", choices=[cause.value for cause in Cause], help="Of a run: only rollouts that ended by this cause."
        )

    def handle(self, *args: Any, id: UUID, environment: str, only_cause: str | None, **options: Any) -> None:
        row = Run.objects.filter(id=id).first() or Rollout.objects.filter(id=id).first()
        if row is None:
            raise CommandError(f"There is no run and no rollout {id}.")
        version = _version(row.project, environment)
        try:
            if isinstance(row, Run):
                cause = Cause(only_cause) if only_cause else None
                asked = rescore_run(project=row.project, run_id=id, environment_id=version, only_cause=cause)
                self.stdout.write(
                    f"{asked.queued} queued, {asked.going_on} going on already, {asked.left_out} cannot be scored again"
                )
            elif only_cause:
                raise CommandError("--only-cause is for runs; this is a rollout.")
            else:
                rescoring = rescore_rollout(project=row.project, rollout_id=id, environment_id=version)
                self.stdout.write(f"rescoring {rescoring.pk} is {rescoring.state}")
        except Refused as refused:
            raise CommandError(refused.detail) from refused


def _version(project: Project, wanted: str) -> UUID | None:
    if not wanted:
        return None
    name, _, number = wanted.partition("@")
    versions = Environment.objects.filter(project=project, name=name)
    found = versions.filter(version=int(number)).first() if number.isdecimal() else None
    if found is None:
        known = ", ".join(f"{name}@{version}" for version in versions.order_by("version").values_list("version", flat=True))
        raise CommandError(f"--environment {wanted}: no such version in project {project.name}; there is {known or 'none'}.")
    return found.id
