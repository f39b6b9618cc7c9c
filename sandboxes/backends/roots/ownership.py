"""Which user of the host sandboxes run as, and thus whose the files of images must be. No Django."""

from __future__ import annotations

import os

_UNPRIVILEGED_USER = 65534


def sandbox_user() -> int | None:
    """Host user, and group, of the sandboxes; None: our own.

    When the platform runs as root, sandboxes run as an unprivileged user. An agent can change in its copy of an image what that
    user could change in the image, so the files of an image belong to it.
    """
    return _UNPRIVILEGED_USER if os.geteuid() == 0 else None
