"""What a trainer of a coding agent submits: groups that share a long prompt, few long rollouts among many short ones, tools."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from .servers import BLOCK


class Turn(NamedTuple):
    """A reply of so many tokens, a tool that takes so long, and what it says."""

    output: int
    pause: float
    observation: int


@dataclass
class Rollout:
    """One episode, and how far it is."""

    number: int
    group: int
    prompt: int  # tokens that its group shares
    turns: list[Turn]
    turn: int = 0
    own: int = 0  # tokens after the shared prompt
    begun: float | None = None
    asked: float = 0.0  # when its present call was first made
    failed_on: set[int] = field(default_factory=set)

    def blocks(self) -> list[Hashable]:
        """Its present prompt, in blocks of the prefix cache."""
        shared: list[Hashable] = [("group", self.group, n) for n in range(self.prompt // BLOCK)]
        return shared + [("rollout", self.number, n) for n in range((self.prompt % BLOCK + self.own) // BLOCK)]


def workload(seed: int, groups: int) -> list[Rollout]:
    """The rollouts in the order of their submission."""
    chance = random.Random(seed)
    rollouts: list[Rollout] = []
    for group in range(groups):
        prompt = _skewed(chance, 4_000, 0.5, 16_000)
        for _ in range(chance.randint(8, 16)):
            turns = [_turn(chance) for _ in range(_skewed(chance, 6, 0.9, 60))]
            rollouts.append(Rollout(len(rollouts), group, prompt, turns))
    return rollouts


def _turn(chance: random.Random) -> Turn:
    return Turn(_skewed(chance, 120, 0.7, 1_000), chance.lognormvariate(0.4, 1.0), _skewed(chance, 250, 0.8, 2_000))


def _skewed(chance: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * chance.lognormvariate(0.0, sigma))))
