"""Runs, groups, rollouts and their history."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from rollouts.api.serializers.limits import LIMITED_FIELDS, LimitedSerializer
from rollouts.models import Attempt, Group, Reward, Rollout, RolloutEvent, Run
from rollouts.selectors import rollouts as selectors
from rollouts.selectors.storage import whole_artefacts

_COUNTS_HELP = "Every state, and how many rollouts are in it."


class RunSerializer(LimitedSerializer, serializers.ModelSerializer[Run]):
    policy = serializers.CharField(source="policy.name", read_only=True)

    class Meta:
        model = Run
        fields = ["id", "name", "policy", "priority", "settings", "created_at", "cancelled_at", "keep", *LIMITED_FIELDS]
        read_only_fields = fields


class RunDetailSerializer(RunSerializer):
    """Wants `counts` in its context."""

    counts = serializers.SerializerMethodField(help_text=_COUNTS_HELP)
    progress = serializers.SerializerMethodField(help_text="Share of the rollouts that have ended, 0 to 1.")

    class Meta(RunSerializer.Meta):
        fields = [*RunSerializer.Meta.fields, "counts", "progress"]
        read_only_fields = fields

    def get_counts(self, run: Run) -> dict[str, int]:
        return dict(self.context["counts"])

    def get_progress(self, run: Run) -> float:
        return selectors.progress(self.context["counts"])


class SubmittedGroupSerializer(serializers.ModelSerializer[Group]):
    run = serializers.UUIDField(source="run_id", read_only=True)
    task = serializers.UUIDField(source="task_id", read_only=True)

    class Meta:
        model = Group
        fields = ["id", "run", "task", "n", "created_at"]
        read_only_fields = fields


class SubmittedGroupsSerializer(serializers.Serializer[Any]):
    """In the order of the request."""

    groups = SubmittedGroupSerializer(many=True, read_only=True)


class GroupSerializer(SubmittedGroupSerializer):
    """Wants `counts` (by group id) in its context."""

    dataset = serializers.CharField(source="task.dataset.name", read_only=True)
    task_key = serializers.CharField(source="task.key", read_only=True)
    counts = serializers.SerializerMethodField(help_text=_COUNTS_HELP)

    class Meta(SubmittedGroupSerializer.Meta):
        fields = ["id", "run", "task", "dataset", "task_key", "n", "counts", "created_at"]
        read_only_fields = fields

    def get_counts(self, group: Group) -> dict[str, int]:
        return dict(self.context["counts"][group.id])


class TerminationSerializer(serializers.Serializer[Any]):
    """Why a rollout ended."""

    phase = serializers.CharField(help_text="queue, init, run or eval")
    cause = serializers.CharField()
    blame = serializers.CharField(help_text="policy, infrastructure or caller")
    detail = serializers.CharField()


class RolloutSerializer(serializers.ModelSerializer[Rollout]):
    run = serializers.UUIDField(source="run_id", read_only=True)
    group = serializers.UUIDField(source="group_id", read_only=True)
    task = serializers.UUIDField(source="task_id", read_only=True)
    task_key = serializers.CharField(source="task.key", read_only=True)
    environment = serializers.CharField(source="environment.name", read_only=True)
    environment_version = serializers.IntegerField(source="environment.version", read_only=True)
    state = serializers.CharField(read_only=True)
    fidelity = serializers.CharField(read_only=True, help_text="token-exact, segmented or text-only; empty before it has run")
    termination = serializers.SerializerMethodField(help_text="Null until the agent is done.")

    class Meta:
        model = Rollout
        fields = [
            "id",
            "run",
            "group",
            "index",
            "task",
            "task_key",
            "environment",
            "environment_version",
            "state",
            "attempt",
            "infra_retries",
            "priority",
            "reward",
            "reward_version",
            "trainable",
            "termination",
            "fidelity",
            "required_version",
            "policy_version",
            "oldest_version",
            "turns",
            "prompt_tokens",
            "sampled_tokens",
            "node",
            "cancel_requested_at",
            "created_at",
            "state_changed_at",
            "finished_at",
            "queue_seconds",
            "init_seconds",
            "run_seconds",
            "eval_seconds",
            "events_pruned_at",
            "trajectory_pruned_at",
        ]
        read_only_fields = fields

    @extend_schema_field(TerminationSerializer(allow_null=True))
    def get_termination(self, rollout: Rollout) -> dict[str, str] | None:
        if not rollout.termination_cause:
            return None
        return {
            "phase": rollout.termination_phase,
            "cause": rollout.termination_cause,
            "blame": rollout.termination_blame,
            "detail": rollout.termination_detail,
        }


class AttemptSerializer(serializers.ModelSerializer[Attempt]):
    stage = serializers.CharField(read_only=True, help_text="Where it ended: init, run or eval.")

    class Meta:
        model = Attempt
        fields = ["number", "node", "started_at", "ended_at", "stage", "outcome", "error", "traceback"]
        read_only_fields = fields


class RolloutDetailSerializer(RolloutSerializer):
    """With `excerpts` in its context, large artefacts are only excerpts."""

    artefacts = serializers.SerializerMethodField(help_text="What RUN left for evaluation.")
    attempts = AttemptSerializer(many=True, read_only=True)

    class Meta(RolloutSerializer.Meta):
        fields = [*RolloutSerializer.Meta.fields, "artefacts", "attempts"]
        read_only_fields = fields

    def get_artefacts(self, rollout: Rollout) -> dict[str, Any]:
        return dict(rollout.artefacts if self.context.get("excerpts") else whole_artefacts(rollout))


class RolloutEventSerializer(serializers.ModelSerializer[RolloutEvent]):
    kind = serializers.CharField(read_only=True)

    class Meta:
        model = RolloutEvent
        fields = ["id", "attempt", "at", "kind", "from_state", "to_state", "data"]
        read_only_fields = fields


class RewardSerializer(serializers.ModelSerializer[Reward]):
    class Meta:
        model = Reward
        fields = ["version", "name", "value", "weight", "detail", "created_at"]
        read_only_fields = fields


class RewardsSerializer(serializers.Serializer[Any]):
    reward = serializers.FloatField(allow_null=True, read_only=True, help_text="Weighted sum of the newest version.")
    components = RewardSerializer(many=True, read_only=True, help_text="All versions, oldest first.")


class CancelledSerializer(serializers.Serializer[Any]):
    cancelled = serializers.IntegerField(read_only=True, help_text="Rollouts that were still going.")
