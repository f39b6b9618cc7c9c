"""A message broker made of files, for one machine: no server to install, start or secure.

Each queue is a folder, each message a file. kombu's own file-system transport writes a message in place, so that a reader
polling quickly opens half a message and dies of it. Here a message appears by a rename, complete, and is claimed by the one
consumer whose unlink succeeds.

A message that a consumer took is not delivered again when that consumer is killed. Messages are only hints here: leases and the
dispatcher in Postgres bring back what was lost.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.parse import quote

from kombu.transport import TRANSPORT_ALIASES, virtual

SCHEME = "prorl-filesystem"
POLLING_SECONDS = 0.05  # delay of a message to an idle consumer; an idle consumer costs under 1 % of a core
LONGEST_WAIT_SECONDS = 0.2
MESSAGE = ".message"


class Channel(virtual.Channel):
    """Queues below the folder that the broker URL names."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        client: Any = self.connection.client
        self._root = Path("/", client.virtual_host)
        self._seen: defaultdict[str, deque[Path]] = defaultdict(deque)  # by queue: listed, not yet tried, oldest first

    def _new_queue(self, queue: str, **_: Any) -> None:
        self._queue_folder(queue).mkdir(mode=0o700, parents=True, exist_ok=True)

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        folder = self._queue_folder(queue)
        file = folder / f"{time.time_ns():020d}-{uuid.uuid4().hex}{MESSAGE}"  # file names in order of publication
        partial = file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(message))
        except FileNotFoundError:
            self._new_queue(queue)
            partial.write_text(json.dumps(message))
        partial.rename(file)

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        seen = self._seen[queue]
        if not seen:
            seen.extend(sorted(self._messages(queue)))
        while seen:
            file = seen.popleft()
            try:
                text = file.read_text()
                file.unlink()
            except FileNotFoundError:
                continue  # another consumer was first
            message: dict[str, Any] = json.loads(text)
            return message
        raise Empty

    def _size(self, queue: str) -> int:
        return sum(1 for _ in self._messages(queue))

    def _purge(self, queue: str) -> int:
        purged = 0
        for file in list(self._messages(queue)):
            try:
                file.unlink()
            except FileNotFoundError:
                continue
            purged += 1
        return purged

    def _messages(self, queue: str) -> Iterator[Path]:
        return self._queue_folder(queue).glob(f"*{MESSAGE}")

    def _queue_folder(self, queue: str) -> Path:
        return self._root / f"{quote(queue, safe='')}.queue"  # no queue name can lead out of the folder


class Transport(virtual.Transport):
    """Registered as `prorl-filesystem:///absolute/folder`."""

    Channel = Channel
    driver_type = driver_name = "filesystem"
    default_port = 0
    polling_interval = POLLING_SECONDS
    global_state = virtual.BrokerState()  # shared by the connections of a process: a binding declared on one holds for all

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.state = self.global_state

    def drain_events(self, connection: Any, timeout: float | None = None, **options: Any) -> None:
        client: Any = self.client
        longest: float | None = client.transport_options.get("longest_wait")
        if longest is not None:
            timeout = min(timeout or longest, longest)
        super().drain_events(connection, timeout=timeout, **options)

    def driver_version(self) -> str:
        return "1"


def filesystem_broker_settings(folder: Path) -> dict[str, Any]:
    """Celery settings for a broker in `folder`, which is created, closed to other users."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    TRANSPORT_ALIASES[SCHEME] = f"{__name__}:Transport"
    return {
        # A host, though there is none: kombu warns of a URL without one.
        "broker_url": f"{SCHEME}://localhost{quote(str(folder.absolute()))}",
        # Celery waits two seconds at a time and looks only then whether it was told to stop.
        "broker_transport_options": {"longest_wait": LONGEST_WAIT_SECONDS},
    }
