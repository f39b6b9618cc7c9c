"""Running the suite for a person at a terminal, or for a program."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict

from sandboxes.protocol import Backend
from sandboxes.selfcheck.framework import CheckResult, Outcome, run_checks


async def run_and_print(backend: Backend, write: Callable[[str], object], *, as_json: bool) -> bool:
    """Run all checks, `write` one line for each and a JSON object with the counts as the last; True when none failed."""

    def report(result: CheckResult) -> None:
        if as_json:
            write(json.dumps(asdict(result)))
            return
        write(f"{result.outcome:7} {result.seconds:6.2f}s  {result.id}: {result.description}")
        if result.detail:
            write("\n".join(f"                 {line}" for line in result.detail.rstrip().splitlines()))

    results = await run_checks(backend, report)
    counts = {outcome.value: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    write(json.dumps({"backend": backend.name, "user": os.geteuid(), **counts}))
    return counts[Outcome.FAILED] == 0
