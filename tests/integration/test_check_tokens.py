"""`check_tokens`: every stored trajectory is looked at, and what is wrong is named."""

from __future__ import annotations

from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from rollouts.lifecycle import State
from rollouts.models import Blob, MessagePicture, ModelCall, Rollout
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(db: None) -> Domain:
    return Domain()


def sampled(
    rollout: Rollout, *, fidelity: str, attempt: int = 1, segments: tuple[int, ...] = (0, 0), ids: bool = True
) -> Rollout:
    """With one call for each of `segments`, the third one of segment 0."""
    lengths: dict[int, int] = {}
    for turn, segment in enumerate(segments):
        sent = lengths.get(segment, 0) + 2
        ModelCall.objects.create(
            rollout=rollout,
            attempt=attempt,
            turn=turn,
            segment=segment,
            context_ids=[1, 2],
            sampled_ids=[3] if ids else [],
            logprobs=[-0.5] if ids else None,
            finish_reason="stop",
            prompt_tokens=sent,
            policy="tiny",
            policy_version=1,
            latency=0.1,
        )
        lengths[segment] = sent + ids
    Rollout.objects.filter(id=rollout.id).update(fidelity=fidelity)
    return rollout


def check(*arguments: str) -> tuple[str, int]:
    """What the command prints, and its exit status."""
    out = StringIO()
    try:
        call_command("check_tokens", *arguments, stdout=out, no_color=True)
    except SystemExit as exit_:
        return out.getvalue(), int(str(exit_.code))
    return out.getvalue(), 0


def test_all_is_well(world: Domain) -> None:
    sampled(world.rollout_in(State.SUCCEEDED), fidelity="token-exact")
    sampled(world.rollout_in(State.SUCCEEDED), fidelity="segmented", segments=(0, 1, 0, 1))
    sampled(world.rollout_in(State.SUCCEEDED), fidelity="text-only", segments=(0, 1), ids=False)
    world.rollout_in(State.QUEUED)
    expected = "8 calls checked; attempts: 1 segmented, 1 text-only, 1 token-exact; 0 wrong\n"
    assert check("--all") == check("--run", str(world.run.id)) == (expected, 0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt_tokens": 9}, "turn 1 sent 9 ids, but 5 are stored"),
        ({"segment": 3}, "turn 1 is of segment 3"),
        ({"logprobs": [-0.5, -0.5]}, "turn 1 has 2 logprobs for 1 sampled ids"),
        ({"logprobs": [float("nan")]}, "turn 1 has a logprob that is not finite"),
        ({"version_spans": [[1, 7]]}, "turn 1 has weight versions for 7 of 1 sampled ids"),
    ],
)
def test_what_is_wrong_is_named(world: Domain, change: dict[str, Any], problem: str) -> None:
    rollout = sampled(world.rollout_in(State.SUCCEEDED), fidelity="token-exact")
    sampled(world.rollout_in(State.SUCCEEDED), fidelity="token-exact")
    ModelCall.objects.filter(rollout=rollout, turn=1).update(**change)
    shown, status = check("--all")
    assert f"WRONG rollout {rollout.id} attempt 1: {problem}" in shown
    assert shown.endswith("; 1 wrong\n")
    assert status == 1


def test_pictures_are_where_they_can_be_and_their_data_is_there(world: Domain) -> None:
    rollout = sampled(world.rollout_in(State.SUCCEEDED), fidelity="token-exact")
    blob = Blob.objects.create(sha256="c" * 64, file="c", size=1, stored_size=1, encoding="identity")
    calls = ModelCall.objects.filter(rollout=rollout, turn=1)
    calls.update(placed=[[1, 1, blob.sha256]])
    assert f"attempt 1: turn 1 has a picture that no message has, {blob.sha256}\n" in check("--all")[0]
    MessagePicture.objects.create(rollout=rollout, attempt=1, message=0, index=0, mime="image/png", blob=blob)
    assert check("--all") == ("2 calls checked; attempts: 1 token-exact; 0 wrong\n", 0)
    calls.update(placed=[[1, 2, blob.sha256]])
    assert "attempt 1: turn 1 has a wrong place for a picture" in check("--all")[0]


def test_a_badge_that_does_not_fit_is_wrong(world: Domain) -> None:
    sampled(world.rollout_in(State.SUCCEEDED), fidelity="token-exact", segments=(0, 1))
    shown, status = check("--all")
    assert "its badge is token-exact, its calls are segmented" in shown
    assert status == 1


def test_earlier_attempts_are_checked_without_a_badge(world: Domain) -> None:
    rollout = world.rollout_in(State.SUCCEEDED)
    sampled(rollout, fidelity="token-exact", segments=(0, 1))
    Rollout.objects.filter(id=rollout.id).update(attempt=2)
    sampled(rollout, fidelity="token-exact", attempt=2)
    assert check("--all") == ("4 calls checked; attempts: 1 segmented, 1 token-exact; 0 wrong\n", 0)


def test_a_run_must_be_there(world: Domain) -> None:
    with pytest.raises(CommandError, match="there is no run"):
        check("--run", str(uuid4()))
    with pytest.raises(CommandError, match="one of the arguments"):
        check()
