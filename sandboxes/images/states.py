"""The states of images and of their builds, and the moves between them. No Django.

    image:  PENDING -> BUILDING -> READY         build:  QUEUED -> RUNNING -> SUCCEEDED | FAILED | CANCELLED
            FAILED  -> PENDING

An image that is READY stays so while it is built anew, and when that fails: rollouts go on with what is there. A build goes
back to QUEUED when its worker was lost or stopped, or when it failed in a way that may pass.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class ImageState(enum.StrEnum):
    """Whether an image can be used."""

    PENDING = "pending"  # nothing is built: not yet, or not any more
    BUILDING = "building"
    READY = "ready"
    FAILED = "failed"  # its last build failed, and there is nothing from before


class BuildState(enum.StrEnum):
    """How far one build of an image is. A build is RUNNING in one worker, which renews its lease."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Format(enum.StrEnum):
    """In which form an image is kept."""

    DIRECTORY = "directory"  # a root file system, unpacked
    SIF = "sif"  # one compressed file, which Apptainer runs and bubblewrap mounts


UNFINISHED = (BuildState.QUEUED, BuildState.RUNNING)

IMAGE_MOVES: Mapping[ImageState, frozenset[ImageState]] = {
    ImageState.PENDING: frozenset({ImageState.BUILDING, ImageState.READY}),  # READY at once: the same was built before
    ImageState.BUILDING: frozenset({ImageState.READY, ImageState.FAILED, ImageState.PENDING}),
    ImageState.READY: frozenset({ImageState.READY, ImageState.PENDING}),  # built anew; pruned
    ImageState.FAILED: frozenset({ImageState.PENDING}),
}

BUILD_MOVES: Mapping[BuildState, frozenset[BuildState]] = {
    BuildState.QUEUED: frozenset({BuildState.RUNNING, BuildState.CANCELLED}),
    BuildState.RUNNING: frozenset({BuildState.QUEUED, BuildState.SUCCEEDED, BuildState.FAILED, BuildState.CANCELLED}),
    BuildState.SUCCEEDED: frozenset(),
    BuildState.FAILED: frozenset(),
    BuildState.CANCELLED: frozenset(),
}
