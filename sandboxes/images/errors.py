"""Why an image is not built. No Django."""

from __future__ import annotations

from typing import NamedTuple


class FieldProblem(NamedTuple):
    """One thing wrong with what was asked for: a JSON pointer (`/source/path`) and a sentence that says how to fix it."""

    pointer: str
    detail: str


class ImageRefused(Exception):
    """The request cannot be carried out and has changed nothing."""

    def __init__(self, *problems: FieldProblem) -> None:
        super().__init__("; ".join(problem.detail for problem in problems))
        self.problems = problems


class ImageBusy(Exception):
    """The image is in a state that does not allow this; nothing was changed."""


class BuildFailed(Exception):
    """A try came to nothing. `retryable`: what failed may pass by itself (a mirror that does not answer)."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class BadSource(BuildFailed):
    """What the image is to be made from is not there, not readable, damaged or hostile. Trying again changes nothing."""


class Interrupted(Exception):
    """Raised in a thread of a build that was cancelled."""
