"""From the settings of a source to an entry in the store. No Django."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.staging import is_reachable
from sandboxes.images.convert import to_directory, to_sif
from sandboxes.images.digest import read_contents
from sandboxes.images.errors import BuildFailed
from sandboxes.images.job import RESERVE_BYTES, Job, Made, Monitor
from sandboxes.images.sources import KINDS
from sandboxes.images.sources.base import SourceSettings
from sandboxes.images.states import Format
from sandboxes.images.store import Entry, Store
from sandboxes.protocol import Backend

_RECIPES = 1  # to be raised when the same settings come to give another image
_GIB = 1 << 30


def input_key(kind: str, settings: SourceSettings, format: Format, base: Entry | None) -> str:
    """A hash of all that an image is made from: the same key, the same image. Raises BadSource when a file is not readable."""
    document: list[Any] = [_RECIPES, kind, settings.model_dump(mode="json"), format.value, base.digest if base else ""]
    document.append(KINDS[kind].identity(settings))
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


async def build_image(
    store: Store,
    *,
    name: str,
    kind: str,
    settings: SourceSettings,
    format: Format,
    base: Entry | None,
    backend: Backend,
    monitor: Monitor,
    apptainer: str = "",
) -> Entry:
    """Make the image in a workspace called `name`, and add it to the store.

    Raises BuildFailed. When this is cancelled, nothing of it goes on, and nothing is left but the log.
    """
    source = KINDS[kind]
    owner = sandbox_user()
    free = store.free_bytes()
    if owner is not None and not is_reachable(store.folder / "any"):
        raise BuildFailed(
            f"sandboxes run as user {owner}, who cannot go to {store.folder}: set PRORL_IMAGE_DIR to a directory that "
            "everybody may enter, such as /var/lib/prorl/images"
        )
    needed = source.space(settings) + (2 * base.size if base else 0)
    if free - RESERVE_BYTES < needed:
        raise BuildFailed(
            f"about {needed / _GIB:.1f} GiB are needed, and of the {free / _GIB:.1f} GiB that are free in {store.folder} "
            f"{RESERVE_BYTES / _GIB:.0f} GiB are not to be used: prune images, or make room"
        )
    with store.workspace(name) as workspace:
        job = Job(
            name=name,
            workspace=workspace,
            owner=owner,
            room=free - RESERVE_BYTES,
            monitor=monitor,
            format=format,
            backend=backend,
            base=base,
            apptainer=apptainer,
        )
        try:
            made = await source.make(settings, job)
            job.whole = 1.0
            made = await _converted(job, made)
            job.step("reading it once more, for its digest", 0.98, 1.0)
            contents = await job.in_thread(read_contents, made.path, made.format, job.check)
            return await job.in_thread(store.add, made.path, made.format, contents, env=made.env, labels=made.labels)
        except OSError as error:
            raise BuildFailed(f"{error.filename or store.folder}: {error.strerror}", retryable=True) from error
        finally:
            job.threads.shutdown(wait=False)


async def _converted(job: Job, made: Made) -> Made:
    if made.format is job.format:
        return made
    if job.format is Format.SIF:
        return Made(await to_sif(job, made.path), Format.SIF, made.env, made.labels)
    return Made(await to_directory(job, made.path), Format.DIRECTORY, made.env, made.labels)
