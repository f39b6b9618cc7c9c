"""What the registry and the validation of settings and tasks raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Problem(NamedTuple):
    """What is wrong with one value. `pointer` is a JSON pointer into the document, empty for the whole of it."""

    pointer: str
    message: str


class UnknownEnvironment(LookupError):
    """No installed package offers an environment of this name."""


class BrokenEnvironment(Exception):
    """An environment of this name is registered, but cannot be loaded."""


class ValidationFailed(ValueError):
    """A document does not fit its model, or a task cannot be scored."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{problem.pointer or '/'}: {problem.message}" for problem in problems))
        self.problems = list(problems)
