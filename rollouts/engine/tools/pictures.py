"""Which of the pictures that tools displayed a model is shown with their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from rollouts.llm.pictures import picture_of
from sandboxes.protocol import Picture

MAX_ROLLOUT_BYTES = 32 * 1024 * 1024  # every later prompt carries them again
_REFUSED = "the model server does not take such a picture, or no more of them"

# Whether the model can be shown these pictures together.
CanShow = Callable[[Sequence[Picture]], Awaitable[bool]]


class Choice(NamedTuple):
    """The pictures to show with a result, and what to say of all that were displayed."""

    shown: tuple[Picture, ...]
    notes: tuple[str, ...]


class PictureChooser:
    """Chooses for one rollout. What a program displays is the policy's doing, so that a bad picture must end nothing."""

    def __init__(self, max_pictures: int) -> None:
        """At most `max_pictures` are shown with each result."""
        self._max_pictures = max_pictures
        self._bytes_left = MAX_ROLLOUT_BYTES

    async def choose(self, displayed: Sequence[Picture], can_show: CanShow) -> Choice:
        """The first ones that can be shown; every other one is left out with a reason.

        Those that the server refuses count as well: a program could have it look at any number of them.
        """
        shown: list[Picture] = []
        left_out: Counter[str] = Counter()
        for each in displayed:
            if len(shown) + left_out[_REFUSED] == self._max_pictures:
                left_out[f"at most {self._max_pictures} are shown with a result"] += 1
                continue
            try:
                picture = picture_of(each.data)
            except ValueError as error:
                left_out[str(error)] += 1
                continue
            if len(picture.data) > self._bytes_left:
                left_out[f"those shown before leave room for {self._bytes_left} bytes"] += 1
            elif not await can_show([*shown, picture]):
                left_out[_REFUSED] += 1
            else:
                self._bytes_left -= len(picture.data)
                shown.append(picture)
        notes = [f"pictures shown: {_kinds(shown)}"] if shown else []
        notes += [f"pictures displayed, kept but not shown here: {count}; {why}" for why, count in left_out.items()]
        return Choice(tuple(shown), tuple(notes))


def none_shown(displayed: Sequence[Picture]) -> Choice:
    """For a model of text, which is only told of them."""
    return Choice((), (f"pictures displayed, kept but not shown here: {_kinds(displayed)}",) if displayed else ())


def _kinds(pictures: Sequence[Picture]) -> str:
    return ", ".join(f"{number} {mime}" for mime, number in Counter(picture.mime for picture in pictures).items())
