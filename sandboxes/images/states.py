"""The states of images and of their builds, and the moves between them. No Django.

    image:  PENDING -> BUILDING -> READY -> PENDING (pruned)      build:  QUEUED -> RUNNING -> SUCCEEDED | FAILED | CANCELLED
            BUILDING -> PENDING (another try), FAILED                     RUNNING -> QUEUED;  QUEUED -> CANCELLED
            FAILED -> PENDING (asked for again)

An image that is READY stays so while it is built anew, and when that fails: rollouts go on with what is there. A build goes
back to QUEUED when its worker was lost or stopped, or when it failed in a way that may pass.
"""

from __future__ import annotations

import enum


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
