"""The ledger: what became of every rollout of a run, and what was left behind. Every complaint is a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from prorl_site.embedded.processes import wait_until
from rollouts.lifecycle import TERMINAL
from tests.acceptance.faults.site import Site
from tests.acceptance.faults.trainer import Trainer, is_whole
from tests.acceptance.platform import Platform

_TIDY_SECONDS = 40.0  # a lost worker's sandboxes are swept by a janitor that gives their owners time first


@dataclass
class Verdict:
    """Complaints by kind; all empty when the fault was survived."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is nothing to complain about."""
        return not (self.lost or self.duplicated or self.leaked)

    def __str__(self) -> str:
        kinds = {"lost": self.lost, "duplicated": self.duplicated, "leaked": self.leaked}
        return "\n".join(f"{kind}: {sentence}" for kind, sentences in kinds.items() for sentence in sentences)

    def __iadd__(self, other: Verdict) -> Verdict:
        self.lost += other.lost
        self.duplicated += other.duplicated
        self.leaked += other.leaked
        return self


_ENDS = "(SELECT count(*) FROM rollouts_rolloutevent e WHERE e.rollout_id = r.id AND e.to_state = ANY(%(terminal)s))"
_SCORINGS = "(SELECT count(DISTINCT version) FROM rollouts_reward w WHERE w.rollout_id = r.id)"
_CALLS = "FROM rollouts_modelcall c WHERE c.rollout_id = r.id AND c.attempt = r.attempt"
_MESSAGES = "FROM rollouts_message m WHERE m.rollout_id = r.id AND m.attempt = r.attempt"
_ATTEMPTS = "FROM rollouts_attempt a WHERE a.rollout_id = r.id"

# Each is a condition that no rollout of a run may meet once the run is over.
_LOST = {
    "has not ended": "r.finished_at IS NULL",
    "ended as it should not": (
        "r.finished_at IS NOT NULL AND r.state <> 'succeeded' AND r.termination_cause <> ALL(%(may_fail)s)"
    ),
    "has no event that says how it ended": f"r.finished_at IS NOT NULL AND {_ENDS} = 0",
    "succeeded without a score": f"r.state = 'succeeded' AND ({_SCORINGS} = 0 OR r.reward IS NULL)",
    "was given a reward for a failure of the infrastructure": (
        f"r.termination_blame = 'infrastructure' AND (r.reward IS NOT NULL OR r.trainable OR {_SCORINGS} > 0)"
    ),
    "has a torn trajectory: its turns are not its stored model calls": (
        f"r.state = 'succeeded' AND (r.turns = 0 OR r.turns <> (SELECT count(*) {_CALLS}))"
    ),
    "has a gap in its messages": f"(SELECT count(*) <> coalesce(max(m.index) + 1, 0) {_MESSAGES})",
    "has a gap in the history of its attempts": (
        f"r.attempt <> (SELECT count(*) {_ATTEMPTS}) OR r.attempt <> (SELECT coalesce(max(a.number), 0) {_ATTEMPTS})"
    ),
    "has an attempt that never ended": f"EXISTS (SELECT {_ATTEMPTS} AND (a.ended_at IS NULL OR a.outcome = ''))",
    "does not say how its last attempt ended": (
        f"r.finished_at IS NOT NULL AND NOT EXISTS (SELECT {_ATTEMPTS} AND a.number = r.attempt AND a.outcome = r.state)"
    ),
}
_DUPLICATED = {
    "ended more than once": f"{_ENDS} > 1",
    "was scored more than once": f"{_SCORINGS} > 1",
    "was finished by more than one attempt": (f"(SELECT count(*) {_ATTEMPTS} AND a.outcome = ANY(%(terminal)s)) > 1"),
}
_LEAKED = {
    "is still held by a worker": "r.lease_owner_id IS NOT NULL",
}


def audit_run(site: Site, trainer: Trainer, may_fail: tuple[str, ...] = ()) -> Verdict:
    """Everything but sandboxes and processes; those take their time to go. `may_fail` names causes that are no loss."""
    verdict = Verdict()
    verdict.lost += [f"the trainer gave up: {error}" for error in trainer.errors]
    for sentences, conditions in ((verdict.lost, _LOST), (verdict.duplicated, _DUPLICATED), (verdict.leaked, _LEAKED)):
        for what, condition in conditions.items():
            sentences += [f"rollout {row} {what}" for row in _meeting(site.platform, trainer, condition, may_fail)]
    _audit_delivery(site, trainer, verdict)
    return verdict


def _meeting(platform: Platform, trainer: Trainer, condition: str, may_fail: tuple[str, ...]) -> list[str]:
    columns = "r.id, r.state, r.attempt, r.termination_cause AS cause"
    query = f"SELECT {columns} FROM rollouts_rollout r WHERE r.run_id = %(run)s AND ({condition})"  # noqa: S608 - constants
    rows = platform.rows(query, run=trainer.run_id, terminal=sorted(TERMINAL), may_fail=list(may_fail))
    return [f"{row['id']} ({row['state']} {row['cause']}, attempt {row['attempt']})" for row in rows]


def _audit_delivery(site: Site, trainer: Trainer, verdict: Verdict) -> None:
    """What the trainer got while the fault struck, against what the database holds and what a second reading gives."""
    stored = {str(row["id"]) for row in site.platform.rows("SELECT id FROM rollouts_rollout WHERE run_id = %s", trainer.run_id)}
    order = [result["id"] for result in trainer.delivered]
    times = Counter(order)
    if len(stored) < trainer.submitted:
        verdict.lost.append(f"{trainer.submitted - len(stored)} of {trainer.submitted} submitted rollouts are not there")
    if len(stored) > trainer.submitted:
        verdict.duplicated.append(f"{len(stored) - trainer.submitted} rollouts more than the {trainer.submitted} submitted")
    verdict.lost += [f"rollout {id_} was not delivered" for id_ in sorted(stored - set(times))]
    verdict.duplicated += [f"rollout {id_} was delivered {count} times" for id_, count in times.items() if count > 1]
    if trainer.read_again() != order:
        verdict.duplicated.append("a second reading of the results gave others, or another order")
    for result in trainer.delivered:
        if result["state"] == "succeeded" and (torn := _what_is_torn(result)):
            verdict.lost.append(f"rollout {result['id']} was delivered with {torn}")


def _what_is_torn(result: dict[str, Any]) -> str:
    calls, tool_calls = result["trajectory"]["model_calls"], result["trajectory"]["tool_calls"]
    if len(calls) != result["turns"] or not calls:
        return f"{len(calls)} model calls for {result['turns']} turns"
    if any(not call["sampled_ids"] or len(call["sampled_ids"]) != len(call["logprobs"]) for call in calls):
        return "a model call without its tokens"
    if len(tool_calls) != len(calls) - 1:
        return f"{len(tool_calls)} tool calls for {len(calls)} model calls"
    if not all(is_whole(call["output"]) for call in tool_calls):
        return "a tool's output that is not what it printed"
    return ""


def audit_leftovers(site: Site) -> Verdict:
    """Sandboxes and processes, when nothing is to be done any more; waits until the platform has had time to tidy up."""
    platform = site.platform
    leftovers: list[str] = []

    def tidy() -> bool:
        leftovers[:] = [*_sandboxes_on_record(platform), *_sandboxes_running(platform.folder), *_strays(platform)]
        return not leftovers

    wait_until(tidy, timeout=_TIDY_SECONDS, interval=0.5)
    return Verdict(leaked=leftovers)


def _sandboxes_on_record(platform: Platform) -> Iterator[str]:
    for row in platform.rows("SELECT name FROM sandboxes_sandbox WHERE stopped_at IS NULL"):
        yield f"sandbox {row['name']} was not stopped"


def _sandboxes_running(folder: Path) -> Iterator[str]:
    """By the label in their arguments; whose they are tells the log in the platform's folder that they write to."""
    for process in psutil.process_iter(["cmdline"]):
        if any("prorl-sandbox-" in word for word in process.info["cmdline"] or ()):
            try:
                log = Path(f"/proc/{process.pid}/fd/1").readlink()
            except OSError:
                continue  # gone, or of another user
            if log.is_relative_to(folder):
                yield f"process {process.pid} of sandbox {log.parent.name} runs"


def _strays(platform: Platform) -> Iterator[str]:
    """Processes that were started for this platform and belong to none of its living processes."""
    mine = {process.pid for process in platform.processes.values() if process.poll() is None}
    marker = str(platform.folder)
    for process in psutil.process_iter(["environ", "cmdline"]):
        if (process.info["environ"] or {}).get("PRORL_VAR_DIR") != marker:
            continue
        try:
            family = {process.pid, *(parent.pid for parent in process.parents())}
        except psutil.NoSuchProcess:
            continue
        if not family & mine:
            yield f"process {process.pid} belongs to nobody: {' '.join(process.info['cmdline'] or ())[:120]}"
