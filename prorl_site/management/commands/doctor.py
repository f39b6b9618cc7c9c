"""`manage.py doctor`: look at everything the platform stands on."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from prorl_site.doctor import Finding, Status, examine


class Command(BaseCommand):
    help = "Check everything the platform stands on, and say what to do. Exit code 1: something fails."

    requires_system_checks = []  # it reports them itself

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="One JSON object instead of lines for people.")

    def handle(self, *args: Any, **options: Any) -> None:
        findings = []
        for finding in examine():
            findings.append(finding)
            if not options["json"]:
                self._say(finding)
        failed = sum(finding.status is Status.FAIL for finding in findings)
        if options["json"]:
            report = {"ok": not failed, "findings": [finding._asdict() for finding in findings]}
            self.stdout.write(json.dumps(report, indent=2))
        else:
            warned = sum(finding.status is Status.WARN for finding in findings)
            self.stdout.write(
                f"{len(findings) - failed - warned} ok, {_number(warned, 'warning')}, {_number(failed, 'failure')}"
            )
        if failed:
            sys.exit(1)

    def _say(self, finding: Finding) -> None:
        style = {Status.OK: self.style.SUCCESS, Status.WARN: self.style.WARNING, Status.FAIL: self.style.ERROR}[finding.status]
        self.stdout.write(f"{style(f'{finding.status:4}')}  {finding.check:12}  {finding.found}")
        if finding.remedy:
            self.stdout.write(f"{'':20}-> {finding.remedy}")


def _number(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
