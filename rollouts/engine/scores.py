"""What a score must look like before it becomes a reward."""

from __future__ import annotations

import math
from typing import Any

from rollouts.engine.errors import EvaluationFailed
from rollouts.environments.base import RewardComponent, Score


def check_score(score: Any) -> Score:
    """Return the score if it can be stored and trained on.

    Each component has its own name and a finite number or None as its value; a bool is a mistake, and one NaN would spread to
    a whole batch. Raises `EvaluationFailed` otherwise.
    """
    if not isinstance(score, Score):
        raise EvaluationFailed(f"evaluate returned a {type(score).__name__}, not a Score")
    if not score.components:
        raise EvaluationFailed("the score has no components")
    seen: set[str] = set()
    for component in score.components:
        _check_component(component)
        if component.name in seen:
            raise EvaluationFailed(f"two reward components are named {component.name!r}")
        seen.add(component.name)
    return score


def _check_component(component: object) -> None:
    if not isinstance(component, RewardComponent):
        raise EvaluationFailed(f"the score holds a {type(component).__name__}, not a RewardComponent")
    if not isinstance(component.name, str) or not component.name:
        raise EvaluationFailed(f"a reward component is named {component.name!r}")
    if component.value is not None and not _is_finite_number(component.value):
        raise EvaluationFailed(f"the value of {component.name!r} is {component.value!r}, not a finite number or None")
    if not _is_finite_number(component.weight):
        raise EvaluationFailed(f"the weight of {component.name!r} is {component.weight!r}, not a finite number")


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
