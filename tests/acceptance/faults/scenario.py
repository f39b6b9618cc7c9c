"""One fault, struck in every round of a run that is submitted to and read from all the while."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.acceptance.faults.audit import Verdict, audit_run
from tests.acceptance.faults.site import Site
from tests.acceptance.faults.table import Fault, causes
from tests.acceptance.faults.trainer import Trainer

_ROUND_SECONDS = 90.0  # until all rollouts of a round have ended, on a busy machine


@dataclass
class Outcome:
    """What came of a scenario; `repeated` counts attempts and evaluations that were given up and done again."""

    fault: str
    strikes: int
    rollouts: int
    repeated: int
    seconds: float
    verdict: Verdict


def play(site: Site, fault: Fault, *, rounds: int, rollouts: int) -> Outcome:
    """Submit `rollouts` and strike, `rounds` times over; then see what became of them all."""
    begun = time.monotonic()
    trainer = Trainer(site, fault.name, fault.settings)
    stuck = ""
    try:
        for _ in range(rounds):
            trainer.submit(rollouts)
            fault.strike(site, trainer.run_id)
    except AssertionError as error:  # the platform did not get to where the strike goes on
        stuck = str(error)
        site.mend()
    in_time = trainer.close(_ROUND_SECONDS * rounds)
    verdict = audit_run(site, trainer, fault.may_fail)
    if stuck:
        verdict.lost.append(f"the fault was not survived: {stuck}")
    if not in_time:
        verdict.lost.append(f"the results were not complete in time:\n{site.platform.tails()}")
    given_up = causes(site, trainer.run_id)
    if fault.shows and not given_up.get(fault.shows):
        verdict.lost.append(f"no rollout's history names {fault.shows}; it names {given_up}")
    return Outcome(fault.name, rounds, trainer.submitted, sum(given_up.values()), time.monotonic() - begun, verdict)
