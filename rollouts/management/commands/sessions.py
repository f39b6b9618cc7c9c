"""`manage.py sessions list|show|close|cancel`: sessions of agents outside any sandbox."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rollouts.environments.base import RewardComponent
from rollouts.lifecycle import State
from rollouts.models import Project, Rollout
from rollouts.selectors.sessions import listed_sessions
from rollouts.services.errors import Refused
from rollouts.services.session_closing import REWARD, Outcome, close_session
from rollouts.services.sessions import cancel_session, why_ended


class Command(BaseCommand):
    help = "List sessions, show one, close or cancel one."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        listing = actions.add_parser("list")
        listing.add_argument("--project", default="", help="Only this project's.")
        listing.add_argument("--state", default="", choices=["", *State], help="Only those in this state; running: open.")
        listing.add_argument("--limit", type=int, default=50, help="Newest first.")
        for action in ("show", "close", "cancel"):
            parts = actions.add_parser(action)
            parts.add_argument("session", type=UUID, help="Its id.")
            if action == "close":
                parts.add_argument("--outcome", default=Outcome.COMPLETED.value, choices=[*Outcome])
                parts.add_argument("--reward", type=float)
                parts.add_argument("--detail", default="")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "list":
            self._list(options["project"], options["state"], options["limit"])
            return
        rollout = _find(options["session"])
        try:
            if options["action"] == "close":
                reward = options["reward"]
                close_session(
                    session=rollout.session,
                    outcome=Outcome(options["outcome"]),
                    components=None if reward is None else [RewardComponent(REWARD, reward)],
                    detail=options["detail"],
                )
            elif options["action"] == "cancel":
                cancel_session(session=rollout.session)
        except Refused as refused:
            raise CommandError(refused.detail) from None
        self._show(_find(rollout.pk))

    def _list(self, project: str, state: str, limit: int) -> None:
        if limit < 1:
            raise CommandError("--limit must be at least 1.")
        found = listed_sessions(project=_project(project) if project else None, state=state).order_by("-id")[:limit]
        if not found:
            self.stdout.write("There is no such session.")
            return
        self.stdout.write(f"{'session':36}  {'state':10}  {'calls':>5}  {'last seen':20}  {'project':12}  opened by")
        for rollout in found:
            session = rollout.session
            self.stdout.write(
                f"{rollout.pk!s:36}  {_state(rollout):10}  {rollout.turns:>5}  {session.last_seen_at:%Y-%m-%d %H:%M:%SZ}  "
                f"{session.project.name:12}  {session.opened_by}"
            )

    def _show(self, rollout: Rollout) -> None:
        session = rollout.session
        facts = {
            "session": rollout.pk,
            "state": _state(rollout),
            "ended by": why_ended(rollout) if rollout.termination_cause else None,
            "project": session.project.name,
            "run": rollout.run_id,
            "task": f"{rollout.task.key} of {rollout.environment.name}",
            "opened": f"{rollout.created_at:%Y-%m-%d %H:%M:%SZ} by {session.opened_by}",
            "key": f"{session.key_prefix}_…",
            "last seen": f"{session.last_seen_at:%Y-%m-%d %H:%M:%SZ}, may be silent for {session.ttl_seconds} s",
            "calls": f"{rollout.turns}, {rollout.prompt_tokens} prompt tokens, {rollout.sampled_tokens} sampled",
            "reward": rollout.reward,
            "trainable": rollout.trainable if rollout.finished_at else None,
            "metadata": json.dumps(session.metadata, ensure_ascii=False) if session.metadata else None,
        }
        for name, value in facts.items():
            if value is not None:
                self.stdout.write(f"{name:10}  {value}")


def _state(rollout: Rollout) -> str:
    if rollout.state != State.RUNNING.value:
        return rollout.state
    return "open" if rollout.cancel_requested_at is None else "cancelling"


def _project(name: str) -> Project:
    found = Project.objects.filter(name=name).first()
    if found is None:
        known = ", ".join(Project.objects.values_list("name", flat=True)) or "none"
        raise CommandError(f"There is no project {name!r}. There are: {known}.")
    return found


def _find(id_: UUID) -> Rollout:
    try:
        return listed_sessions().get(pk=id_)
    except Rollout.DoesNotExist:
        raise CommandError(f"There is no session {id_}. `prorl sessions list` shows them.") from None
