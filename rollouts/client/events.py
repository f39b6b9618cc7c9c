"""Server-sent events, as far as our streams use them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from .calls import Id, path_of

END = "end"  # the name of a stream's last message


class Event(NamedTuple):
    """One message. To go on behind it in another process, keep its `id` and pass it as `after`."""

    name: str
    data: dict[str, Any]
    id: str


class EventReader:
    """Makes messages of lines. Comments are heartbeats and make none."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def read(self, line: str) -> Event | None:
        """The message that an empty line completes."""
        if line:
            name, _, value = line.partition(":")
            self._fields[name] = value.removeprefix(" ")
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        return Event(fields.get("event", ""), json.loads(fields["data"]), fields.get("id", ""))


def stream_arguments(kind: str, id_: Id, after: str) -> dict[str, Any]:
    """Keyword arguments for httpx's `stream`. `kind` is rollouts or runs."""
    headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
    return {"method": "GET", "url": f"/api/v1{path_of(kind, id_, 'events', 'stream')}", "headers": headers, "timeout": 60.0}
