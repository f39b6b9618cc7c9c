"""Whether the stored trajectories are what was sent and sampled: every prompt extends what came before it in its segment."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple
from uuid import UUID

from rollouts.lifecycle import Fidelity
from rollouts.llm.buffer import validate
from rollouts.models import MessagePicture, ModelCall, Rollout, Run
from rollouts.selectors.trajectory import record_of

_ROLLOUTS_AT_ONCE = 200


class TokenCheck(NamedTuple):
    """What was found of one attempt. `problem` names the turn; it is empty when all is well."""

    rollout_id: UUID
    attempt: int
    calls: int
    fidelity: Fidelity | None  # as the calls have it; None with a problem
    problem: str


def check_tokens(run: Run | None = None) -> Iterator[TokenCheck]:
    """Check every stored attempt, of one run or of all, in order of their rollouts.

    Streams: it holds the calls of one attempt at a time. The badge is compared where the rollout has one, which speaks for its
    newest attempt only.
    """
    rollouts = Rollout.objects.all() if run is None else Rollout.objects.filter(run=run)
    after = UUID(int=0)
    while batch := list(rollouts.filter(id__gt=after).order_by("id").only("attempt", "fidelity")[:_ROLLOUTS_AT_ONCE]):
        after = batch[-1].id
        by_id = {rollout.id: rollout for rollout in batch}
        calls = ModelCall.objects.filter(rollout__in=batch).order_by("rollout_id", "attempt", "turn").iterator(chunk_size=100)
        pictures: defaultdict[tuple[UUID, int], set[str]] = defaultdict(set)
        stored = MessagePicture.objects.filter(rollout__in=batch).values_list("rollout_id", "attempt", "blob_id")
        for rollout_id, attempt, digest in stored:
            pictures[rollout_id, attempt].add(digest)
        for (rollout_id, attempt), group in itertools.groupby(calls, key=lambda call: (call.rollout_id, call.attempt)):
            yield _check(by_id[rollout_id], attempt, group, pictures[rollout_id, attempt])


def _check(rollout: Rollout, attempt: int, calls: Iterator[ModelCall], pictures: set[str]) -> TokenCheck:
    """`pictures` are those whose data is stored with the attempt's messages."""
    checked = 0
    problem = ""

    def counted() -> Iterator[ModelCall]:
        nonlocal checked, problem
        for call in calls:
            checked += 1
            if lost := next((digest for *_, digest in call.placed if digest not in pictures), ""):
                problem = problem or f"turn {call.turn} has a picture that no message has, {lost}"
            yield call

    try:
        found = validate(map(record_of, counted())).fidelity
    except ValueError as error:
        return TokenCheck(rollout.id, attempt, checked, None, str(error))
    if attempt == rollout.attempt and rollout.fidelity and rollout.fidelity != found:
        problem = problem or f"its badge is {rollout.fidelity}, its calls are {found}"
    return TokenCheck(rollout.id, attempt, checked, found, problem)
