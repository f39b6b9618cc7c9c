"""What is too large for a row goes to the blob storage, once for equal content, and leaves it when nothing refers to it.

Order is what makes this safe without a lock. A file is written under a name that is never used again, then the row that names
it; the other way round when it goes. So whatever is killed in between, every row has its whole file, and the worst that is left
behind is a file without a row, which `sweep_files` removes. A writer that stores known content touches its row, and a row
leaves only when nobody has touched it for longer than any writer takes to refer to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any, TypeVar

from django.conf import settings
from django.core.files.base import ContentFile
from django.db import IntegrityError, connection, transaction
from django.db.models import Exists, ForeignObjectRel, OuterRef, QuerySet
from django.utils import timezone

from rollouts.engine.errors import StoreFailed
from rollouts.engine.records import MessageRecord, RunOutcome, ToolCallRecord, TurnRecord
from rollouts.engine.tools import cut_middle
from rollouts.models import Blob, blob_storage

from .storable import storable_json, storable_text

logger = logging.getLogger(__name__)

# The first hex digit of a digest: the pieces in which rows are cleaned. The storage has folders by the first two.
SHARDS = "0123456789abcdef"

_OUR_NAME = re.compile(r"[0-9a-f]{64}\.")

_WithPictures = TypeVar("_WithPictures", MessageRecord, ToolCallRecord)

_EXCERPT_CHARS = 8000
_BATCH = 200

_INSERT = """
INSERT INTO rollouts_blob (sha256, file, size, stored_size, encoding, created_at, touched_at)
VALUES (%s, %s, %s, %s, %s, now(), now())
ON CONFLICT (sha256) DO UPDATE SET touched_at = now() RETURNING file
"""


def put(content: bytes) -> str:
    """Store content, unless it is there already; its SHA-256 in hex, which a row may refer to from now on.

    Call it outside of a transaction: it writes a file. Safe to repeat and to run concurrently. Raises `StoreFailed` when the
    storage does not take it (it is full, or does not answer).
    """
    digest = hashlib.sha256(content).hexdigest()
    if Blob.objects.filter(sha256=digest).update(touched_at=timezone.now()):
        return digest
    encoding, stored = Blob.encode(content)
    file = _save(f"{digest[:2]}/{digest}.{secrets.token_hex(8)}", stored)
    with connection.cursor() as cursor:
        cursor.execute(_INSERT, [digest, file, len(content), len(stored), encoding.value])
        kept = cursor.fetchone()[0]
    if kept != file:  # another writer of the same content was first
        _delete([file])
    return digest


def _save(file: str, stored: bytes) -> str:
    storage = blob_storage()
    try:
        return storage.save(file, ContentFile(stored))
    except Exception as error:  # each storage has exceptions of its own
        _delete([file])
        raise StoreFailed(f"the blob storage does not take {len(stored)} bytes: {error}") from error


def _delete(files: Iterable[str]) -> None:
    """What cannot be deleted now is swept later."""
    for file in files:
        try:
            blob_storage().delete(file)
        except Exception as error:
            logger.warning("blob file %s cannot be deleted now: %s", file, error)


# --- What leaves a rollout's rows -------------------------------------------------------------------------------------------


def is_large(text: str) -> bool:
    """Whether a text is over the threshold in UTF-8."""
    threshold: int = settings.BLOB_THRESHOLD
    return len(text) > threshold or (len(text) * 4 > threshold and len(text.encode("utf-8", "replace")) > threshold)


def offload_tool_output(call: ToolCallRecord) -> ToolCallRecord:
    """The same call; a large output has become a blob, and an excerpt of its beginning and end."""
    if not is_large(call.output):
        return call
    output = storable_text(call.output)
    return dataclasses.replace(call, output=cut_middle(output, _EXCERPT_CHARS)[0], output_blob=put(output.encode()))


def offload_pictures(record: TurnRecord) -> TurnRecord:
    """The same turn, with the pictures of its messages and tool calls stored as blobs: what a model is shown is often both."""
    stored: dict[str, str] = {}

    def with_blobs(part: _WithPictures) -> _WithPictures:
        for picture in part.pictures:
            if picture.digest not in stored:
                stored[picture.digest] = put(picture.data)
        return dataclasses.replace(part, picture_blobs=tuple(stored[picture.digest] for picture in part.pictures))

    return dataclasses.replace(
        record, messages=list(map(with_blobs, record.messages)), tool_calls=list(map(with_blobs, record.tool_calls))
    )


def artefacts_are_large(outcome: RunOutcome) -> bool:
    return is_large(json.dumps(outcome.artefacts, ensure_ascii=False))


def offload_artefacts(outcome: RunOutcome) -> RunOutcome:
    """The same outcome; large artefacts have become a blob, and an excerpt with their long texts cut."""
    if not artefacts_are_large(outcome):
        return outcome
    whole = storable_json(outcome.artefacts)
    excerpt = _excerpt(whole)
    if is_large(json.dumps(excerpt, ensure_ascii=False)):
        excerpt = {}
    return dataclasses.replace(outcome, artefacts=excerpt, artefacts_blob=put(json.dumps(whole, ensure_ascii=False).encode()))


def _excerpt(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _excerpt(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_excerpt(item) for item in value]
    return cut_middle(value, _EXCERPT_CHARS)[0] if isinstance(value, str) else value


def read_artefacts(digest: str) -> Any:
    """Artefacts that had become a blob. Raises `BlobUnreadable`."""
    return Blob.objects.get(sha256=digest).json()


# --- Cleaning ---------------------------------------------------------------------------------------------------------------


def unreferenced(*, untouched_since: datetime) -> QuerySet[Blob]:
    """Blobs that no row refers to, of whatever model."""
    blobs = Blob.objects.filter(touched_at__lt=untouched_since)
    for relation in Blob._meta.get_fields(include_hidden=True):
        if isinstance(relation, ForeignObjectRel):
            referring = relation.related_model._default_manager.filter(**{relation.field.name: OuterRef("pk")})
            blobs = blobs.exclude(Exists(referring))
    return blobs


def remove_unreferenced(*, shard: str, untouched_since: datetime) -> int:
    """Remove a batch of a shard's unreferenced blobs; how many."""
    batch = unreferenced(untouched_since=untouched_since).filter(sha256__gte=shard, sha256__lt=_end(shard))
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            # The lock waits for nobody and looks again at what it locked: a row just touched stays.
            digests = list(batch.order_by().select_for_update(skip_locked=True).values_list("sha256", flat=True)[:_BATCH])
            cursor.execute("DELETE FROM rollouts_blob WHERE sha256 = ANY(%s) RETURNING file", [digests])
            files = [file for (file,) in cursor.fetchall()]
    except IntegrityError:  # the foreign key's word at commit: somebody did refer to one of them meanwhile
        return 0
    _delete(files)
    return len(files)


def folders(*, shard: str) -> list[str]:
    """The storage's folders with files of a shard. Other folders are not ours to touch, nor are other files."""
    try:
        return [folder for folder in blob_storage().listdir("")[0] if len(folder) == 2 and folder.startswith(shard)]
    except FileNotFoundError:  # nothing was ever stored
        return []


def sweep_files(*, folder: str, older_than: datetime) -> int:
    """Delete files that no row names: those of writers and cleaners that were killed halfway; how many."""
    storage = blob_storage()
    present = {f"{folder}/{name}" for name in storage.listdir(folder)[1] if _OUR_NAME.match(name)}
    named = Blob.objects.filter(sha256__gte=folder, sha256__lt=_end(folder)).values_list("file", flat=True)
    stray = []
    for file in present.difference(named):
        with contextlib.suppress(FileNotFoundError):  # its cleaner was only slow
            if storage.get_modified_time(file) < older_than:
                stray.append(file)
    _delete(stray)
    return len(stray)


def _end(prefix: str) -> str:
    """Just after the last digest that begins so: `g` follows the hex digits."""
    return f"{prefix}g"
