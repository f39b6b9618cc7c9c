"""A rollout as one JSON document, in the shapes that the API uses."""

from __future__ import annotations

from typing import Any

from rollouts.api.serializers.runs import RewardSerializer, RolloutDetailSerializer
from rollouts.api.serializers.trajectory import trajectory_json
from rollouts.models import Rollout
from rollouts.selectors.rollouts import rewards_of
from rollouts.selectors.trajectory import trajectories

_ARRAYS = ("sampled_ids", "logprobs")


def rollout_document(rollout: Rollout, *, tokens: bool) -> dict[str, Any]:
    """The rollout, its rewards, and the trajectory of its newest attempt.

    Without `tokens`, token arrays are left out and large values are excerpts. With them it raises `BlobUnreadable`.
    """
    trajectory = trajectory_json(trajectories([rollout], excerpts=not tokens)[rollout.pk])
    if not tokens:
        del trajectory["segments"]
        for call in trajectory["model_calls"]:
            for name in _ARRAYS:
                del call[name]
    return {
        "rollout": RolloutDetailSerializer(rollout, context={"excerpts": not tokens}).data,
        "rewards": RewardSerializer(rewards_of(rollout), many=True).data,
        "trajectory": trajectory,
    }
