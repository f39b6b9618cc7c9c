"""Conversations that a request may go on from by a name, as long as there is room for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from rollouts.llm.messages import numbered_pictures
from rollouts.llm.types import ChatMessage

CHARACTERS = 32_000_000  # of all of them, and bytes of pictures; what they have in common counts each time
_MESSAGE_CHARACTERS = 300  # what a message takes besides its text


class RememberedConversations(Mapping[str, Sequence[ChatMessage]]):
    """The newest ones of a session."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Sequence[ChatMessage], int]] = OrderedDict()
        self._size = 0

    def add(self, name: str, messages: Sequence[ChatMessage]) -> None:
        """Keep it, and forget the oldest ones where that is too much; the newest stays in any case."""
        size = sum(len(message["content"]) + _MESSAGE_CHARACTERS for message in messages)
        size += sum(len(picture.data) for _, picture in numbered_pictures(messages))
        self._known[name] = messages, size
        self._size += size
        while self._size > CHARACTERS and len(self._known) > 1:
            _, (_, freed) = self._known.popitem(last=False)
            self._size -= freed

    def __getitem__(self, name: str) -> Sequence[ChatMessage]:
        return self._known[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
