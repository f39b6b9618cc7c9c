"""`make faults`: every fault strikes again and again. A table, one line of JSON, exit code 1 if one was not survived."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.acceptance.faults.audit import audit_leftovers
from tests.acceptance.faults.scenario import Outcome, play
from tests.acceptance.faults.site import Site, running_site
from tests.acceptance.faults.table import FAULTS, FROZEN_LONG, Fault
from tests.services import rabbitmq

_ROLLOUTS = 48
_COLUMNS = "{:<34} {:>7} {:>8} {:>8} {:>5} {:>10} {:>6} {:>8}  {}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each fault strikes (default 3)")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    arguments = parser.parse_args()
    if reason := rabbitmq.why_missing():
        print(reason, file=sys.stderr)
        return 2
    chosen = [fault for fault in FAULTS if arguments.only in fault.name]
    print(_COLUMNS.format("fault", "strikes", "rollouts", "repeated", "lost", "duplicated", "leaked", "seconds", ""))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="prorl-faults-") as folder:
        if chosen:
            with running_site(Path(folder, "quick")) as site:
                outcomes += [_play(site, fault, arguments.rounds) for fault in chosen]
        if arguments.only in FROZEN_LONG.name:
            # As shipped: a lease of 30 seconds, and a pause that is longer.
            with running_site(Path(folder, "shipped"), lease_seconds=30, heartbeat_seconds=2) as site:
                outcomes.append(_play(site, FROZEN_LONG, 1))
    return _sum_up(outcomes)


def _play(site: Site, fault: Fault, rounds: int) -> Outcome:
    outcome = play(site, fault, rounds=rounds, rollouts=_ROLLOUTS)
    outcome.verdict += audit_leftovers(site)
    verdict = outcome.verdict
    counts = [len(verdict.lost), len(verdict.duplicated), len(verdict.leaked)]
    numbers = [outcome.strikes, outcome.rollouts, outcome.repeated, *counts, f"{outcome.seconds:.0f}"]
    print(_COLUMNS.format(fault.name, *numbers, "survived" if verdict else "NOT SURVIVED"), flush=True)
    if not verdict:
        print(verdict, flush=True)
    site.mend()
    return outcome


def _sum_up(outcomes: list[Outcome]) -> int:
    totals = {
        "faults": sum(outcome.strikes for outcome in outcomes),
        "rollouts": sum(outcome.rollouts for outcome in outcomes),
        "lost": sum(len(outcome.verdict.lost) for outcome in outcomes),
        "duplicated": sum(len(outcome.verdict.duplicated) for outcome in outcomes),
        "leaked": sum(len(outcome.verdict.leaked) for outcome in outcomes),
    }
    print(json.dumps(totals))
    return 0 if all(outcome.verdict for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
