"""The writes that every rollout makes, each in batches with those of the other rollouts of this process."""

from __future__ import annotations

from rollouts.services.finish import finish_scored, finish_unscored, hand_back_claims
from rollouts.services.progress import hand_over_for_evaluation, hand_over_ready, record_turns

from .batches import Batch
from .database import Database


class Writes:
    """Each answers whether the claim was still current."""

    def __init__(self, database: Database) -> None:
        self.initialized = Batch(database, hand_over_ready)
        self.turn = Batch(database, record_turns)
        self.ran = Batch(database, hand_over_for_evaluation)
        self.unscored = Batch(database, finish_unscored)
        self.scored = Batch(database, finish_scored)
        self.given_back = Batch(database, hand_back_claims)
