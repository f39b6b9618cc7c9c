"""The unit of work. Its invariants are constraints below; its moves are checked by a trigger (migration 0002)."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.db.models import Q
from django.utils import timezone

from rollouts.lifecycle import LEASED, TERMINAL, Blame, Cause, EventKind, Fidelity, Phase, Stage, State

from .blob import Blob
from .environment import Environment, Task
from .fields import choices, uuid7
from .llm_server import LLMServer
from .node import WorkerProcess
from .project import Project
from .run import Group, Run

_TERMINAL = sorted(s.value for s in TERMINAL)
_LEASED = sorted(s.value for s in LEASED)
_MAY_BE_LEASED = [*_LEASED, State.EVALUATING.value]
# Nobody has it, nobody was asked to take it, and its backoff is over (the dispatcher clears `not_before` then).
_FREE = Q(lease_owner=None, hinted_at=None, not_before=None)


class Rollout(models.Model):
    """One episode. Written only by `rollouts.services`, always guarded by state, attempt and lease."""

    # No foreign key has Django's own index: a move writes every index of the table, so each is chosen below.
    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    project = models.ForeignKey(Project, models.CASCADE, related_name="rollouts", db_index=False)
    run = models.ForeignKey(Run, models.CASCADE, related_name="rollouts", db_index=False)
    group = models.ForeignKey(Group, models.CASCADE, related_name="rollouts", db_index=False)
    task = models.ForeignKey(Task, models.PROTECT, related_name="rollouts", db_index=False)
    environment = models.ForeignKey(Environment, models.PROTECT, related_name="rollouts", db_index=False)
    index = models.PositiveSmallIntegerField(help_text="Place in its group, from 0.")
    priority = models.PositiveSmallIntegerField(default=50)

    state = models.CharField(max_length=12, choices=choices(State), default=State.QUEUED.value)
    attempt = models.PositiveIntegerField(default=0, help_text="Fencing number; 0 before the first claim.")
    infra_retries = models.PositiveIntegerField(default=0, help_text="Attempts given up for the infrastructure's fault.")
    lease_owner = models.ForeignKey(WorkerProcess, models.PROTECT, null=True, related_name="held", db_index=False)
    cancel_requested_at = models.DateTimeField(null=True)
    cancel_cause = models.CharField(
        max_length=30, blank=True, choices=choices(Cause), help_text="Why its cancel was asked; empty when somebody did."
    )
    not_before = models.DateTimeField(null=True, help_text="Not dispatched before this moment (backoff).")
    hinted_at = models.DateTimeField(null=True, help_text="When the dispatcher last published a hint for its current wait.")
    stuck_at = models.DateTimeField(
        null=True, help_text="When it was found far past its stage's deadline; of this stage if later than `state_changed_at`."
    )

    node = models.CharField(max_length=100, blank=True, help_text="The node that holds its sandbox, or is asked to make it.")
    sandbox_name = models.CharField(max_length=100, blank=True)
    # A server is removed without touching the many rollouts that it once served.
    llm_server = models.ForeignKey(
        LLMServer, models.DO_NOTHING, null=True, related_name="rollouts", db_index=False, db_constraint=False
    )
    required_version = models.PositiveIntegerField(null=True, help_text="The only policy version it may be sampled from.")
    policy_version = models.PositiveIntegerField(null=True, help_text="Of the last sampled id.")
    oldest_version = models.PositiveIntegerField(null=True, help_text="The oldest policy version of any sampled id.")

    created_at = models.DateTimeField(default=timezone.now, editable=False)
    state_changed_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True)
    finished_xid = models.BigIntegerField(null=True, help_text="Transaction that finished it: the order of delivery.")
    queue_seconds = models.FloatField(default=0, help_text="Waiting for a worker, over all stages of the last attempt.")
    init_seconds = models.FloatField(default=0)
    run_seconds = models.FloatField(default=0)
    eval_seconds = models.FloatField(default=0)

    turns = models.PositiveIntegerField(default=0)
    prompt_tokens = models.PositiveIntegerField(default=0, help_text="Tokens of the trajectory that were not sampled.")
    sampled_tokens = models.PositiveIntegerField(default=0)
    earlier_tokens = models.PositiveBigIntegerField(default=0, help_text="Prompt and sampled tokens of earlier attempts.")
    earlier_sandbox_seconds = models.FloatField(default=0, help_text="Stage seconds of earlier attempts that had a sandbox.")
    fidelity = models.CharField(max_length=12, blank=True, choices=choices(Fidelity))

    termination_phase = models.CharField(max_length=10, blank=True, choices=choices(Phase))
    termination_cause = models.CharField(max_length=30, blank=True, choices=choices(Cause))
    termination_blame = models.CharField(max_length=15, blank=True, choices=choices(Blame))
    termination_detail = models.TextField(blank=True)
    run_cause = models.CharField(
        max_length=30, blank=True, choices=choices(Cause), help_text="How RUN ended, also when EVAL failed after it."
    )
    run_detail = models.TextField(blank=True)
    reward = models.FloatField(null=True, help_text="Weighted sum of the newest reward version; null when it is not known.")
    reward_version = models.PositiveIntegerField(default=0, help_text="Of the reward; 0 before it was scored.")
    trainable = models.BooleanField(default=False, help_text="A policy's outcome that the run's settings let into a batch.")
    artefacts: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="What evaluation needs, stored at the end of RUN."
    )
    artefacts_blob = models.ForeignKey(
        Blob,
        models.PROTECT,
        null=True,
        related_name="+",
        db_index=False,
        help_text="All of them, when `artefacts` is only an excerpt to look at.",
    )
    events_pruned_at = models.DateTimeField(null=True, help_text="When retention removed its history.")
    trajectory_pruned_at = models.DateTimeField(
        null=True, help_text="When retention removed its messages, model and tool calls and artefacts."
    )

    class Meta:
        ordering: ClassVar = ["-id"]
        indexes: ClassVar = [
            models.Index(
                fields=["run", "-priority", "id"], name="rollout_queue", condition=_FREE & Q(state=State.QUEUED.value)
            ),
            models.Index(
                fields=["state", "node", "-priority", "id"],
                name="rollout_handed_on",
                condition=_FREE & Q(state__in=[State.READY.value, State.EVALUATING.value]),
            ),
            models.Index(fields=["state", "hinted_at"], name="rollout_hinted", condition=Q(hinted_at__isnull=False)),
            models.Index(
                fields=["not_before"], name="rollout_delayed", condition=Q(not_before__isnull=False, finished_at=None)
            ),
            models.Index(
                fields=["state", "node"], name="rollout_active", condition=~Q(state__in=[*_TERMINAL, State.QUEUED.value])
            ),
            models.Index(fields=["llm_server"], name="rollout_on_server", condition=Q(state=State.RUNNING.value)),
            models.Index(
                fields=["required_version"],
                name="rollout_required_version",
                condition=Q(required_version__isnull=False, finished_at=None),
            ),
            models.Index(fields=["lease_owner"], name="rollout_held", condition=Q(lease_owner__isnull=False)),
            models.Index(
                fields=["id"], name="rollout_cancelling", condition=Q(cancel_requested_at__isnull=False, finished_at=None)
            ),
            models.Index(fields=["run", "finished_xid", "id"], name="rollout_results", condition=Q(finished_xid__isnull=False)),
            models.Index(fields=["finished_xid", "id"], name="rollout_feed", condition=Q(finished_xid__isnull=False)),
            models.Index(
                fields=["project", "finished_at"],
                name="rollout_prune_trajectory",
                condition=Q(finished_at__isnull=False, trajectory_pruned_at=None),
            ),
            models.Index(
                fields=["project", "finished_at"],
                name="rollout_prune_events",
                condition=Q(finished_at__isnull=False, events_pruned_at=None),
            ),
            models.Index(fields=["artefacts_blob"], name="rollout_blob", condition=Q(artefacts_blob__isnull=False)),
            # What lists are narrowed by (benchmarks/list.py): equal values in the order of the list, whatever their share.
            models.Index(fields=["project", "-id"], name="rollout_list"),
            models.Index(fields=["project", "state", "-id"], name="rollout_by_state"),
            models.Index(fields=["run", "-id"], name="rollout_run_list"),
            models.Index(fields=["run", "state", "-id"], name="rollout_run_by_state"),
            models.Index(fields=["environment", "-id"], name="rollout_by_environment"),
            models.Index(fields=["task", "-id"], name="rollout_by_task"),
            models.Index(fields=["project", "node", "-id"], name="rollout_by_node", condition=~Q(node="")),
            models.Index(
                fields=["project", "termination_cause", "-id"], name="rollout_by_cause", condition=~Q(termination_cause="")
            ),
            models.Index(
                fields=["project", "termination_blame", "-id"], name="rollout_by_blame", condition=~Q(termination_blame="")
            ),
            models.Index(fields=["project", "fidelity", "-id"], name="rollout_by_fidelity", condition=~Q(fidelity="")),
            models.Index(
                fields=["project", "policy_version", "-id"],
                name="rollout_by_version",
                condition=Q(policy_version__isnull=False),
            ),
            models.Index(fields=["project", "reward"], name="rollout_by_reward", condition=Q(reward__isnull=False)),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["group", "index"], name="rollout_place_in_group_once"),
            models.CheckConstraint(condition=Q(state__in=[s.value for s in State]), name="rollout_state_known"),
            models.CheckConstraint(
                condition=Q(state__in=_TERMINAL, finished_at__isnull=False, finished_xid__isnull=False)
                | (~Q(state__in=_TERMINAL) & Q(finished_at__isnull=True, finished_xid__isnull=True)),
                name="rollout_finished_iff_terminal",
            ),
            models.CheckConstraint(
                condition=~Q(state__in=_TERMINAL) | ~Q(termination_cause=""), name="rollout_terminal_has_cause"
            ),
            models.CheckConstraint(
                condition=Q(state__in=_LEASED, lease_owner__isnull=False)
                | Q(state=State.EVALUATING.value)
                | (~Q(state__in=_MAY_BE_LEASED) & Q(lease_owner__isnull=True)),
                name="rollout_lease_matches_state",
            ),
            models.CheckConstraint(
                condition=Q(attempt__gte=1) | Q(state__in=[State.QUEUED.value, *_TERMINAL]), name="rollout_active_has_attempt"
            ),
            models.CheckConstraint(
                condition=~Q(termination_blame=Blame.INFRASTRUCTURE.value) | Q(reward__isnull=True, trainable=False),
                name="rollout_infrastructure_has_no_reward",
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)


class Attempt(models.Model):
    """One execution of a rollout: who had it, and how it ended."""

    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    node = models.CharField(max_length=100)
    started_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True)
    stage = models.CharField(max_length=10, blank=True, choices=choices(Stage), help_text="Where it ended.")
    outcome = models.CharField(max_length=30, blank=True, help_text="The state it led to: a terminal one, or queued again.")
    error = models.TextField(blank=True)
    traceback = models.TextField(blank=True)

    class Meta:
        ordering: ClassVar = ["number"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["rollout", "number"], name="attempt_number_once")]

    def __str__(self) -> str:
        return f"{self.rollout_id} attempt {self.number}"


class RolloutEvent(models.Model):
    """Append-only history: one row for every move, written in the same statement as the move."""

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="events")
    attempt = models.PositiveIntegerField()
    at = models.DateTimeField(default=timezone.now)
    kind = models.CharField(max_length=20, choices=choices(EventKind))
    from_state = models.CharField(max_length=12, blank=True)
    to_state = models.CharField(max_length=12, blank=True)
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)

    class Meta:
        ordering: ClassVar = ["id"]

    def __str__(self) -> str:
        return f"{self.kind} {self.from_state} {self.to_state}".strip()
