"""The events of a streamed response. Its output items are written one after the other, and only the last one is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from rollouts.gateway.dialects.base import sse
from rollouts.gateway.dialects.openai_common import call_item
from rollouts.gateway.replies import CallDelta, Event, Finished, ReasoningDelta, Reply, TextDelta

Kind = Literal["message", "reasoning"]

_PART = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIX = {"message": "msg_", "reasoning": "rs_"}


class ResponseStream:
    """One response. `begun` is the response object as it begins."""

    def __init__(self, begun: Mapping[str, Any]) -> None:
        self._begun = begun
        self._id = str(begun["id"]).removeprefix("resp_")
        self._number = -1  # of the last event
        self._items = 0  # written in whole
        self._open: Kind | None = None
        self._text = ""

    def write(self, event: Event, response: Callable[[Reply], Mapping[str, Any]]) -> Iterator[bytes]:
        """What to send for an event; `response` makes the response object of a whole reply."""
        if self._number < 0:
            yield self._event("response.created", response=self._begun)
            yield self._event("response.in_progress", response=self._begun)
        match event:
            case TextDelta(text):
                yield from self._more("message", text)
            case ReasoningDelta(text):
                yield from self._more("reasoning", text)
            case CallDelta():
                yield from self._close()
                yield from self._call(event)
            case Finished(reply):
                yield from self._close()
                whole = response(reply)
                yield self._event(f"response.{whole['status']}", response=whole)

    def _more(self, kind: Kind, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            self._open, self._text = kind, ""
            yield self._event("response.output_item.added", output_index=self._items, item=self._item("in_progress"))
            yield self._event("response.content_part.added", **self._place(), part=self._part())
        self._text += text
        yield self._event(f"response.{_PART[kind]}.delta", **self._place(), delta=text, logprobs=[])

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        yield self._event(f"response.{_PART[self._open]}.done", **self._place(), text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=self._part())
        yield self._event("response.output_item.done", output_index=self._items, item=self._item("completed"))
        self._open = None
        self._items += 1

    def _call(self, event: CallDelta) -> Iterator[bytes]:
        item = call_item(event.call)
        place = {"item_id": item["id"], "output_index": self._items}
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=self._items, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event("response.function_call_arguments.done", **place, name=event.call.name, arguments=item["arguments"])
        yield self._event("response.output_item.done", output_index=self._items, item=item)
        self._items += 1

    def _item(self, status: str) -> dict[str, Any]:
        assert self._open is not None  # noqa: S101 - only asked for while one is
        content = [self._part()] if status == "completed" else []
        item: dict[str, Any] = {"id": _PREFIX[self._open] + self._id, "type": self._open, "status": status, "content": content}
        more: dict[str, Any] = {"role": "assistant"} if self._open == "message" else {"summary": []}
        return item | more

    def _part(self) -> dict[str, Any]:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _place(self) -> dict[str, Any]:
        return {"item_id": _PREFIX[self._open or "message"] + self._id, "output_index": self._items, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)
