"""Making an image startable: where it is, and what is shown in it whatever the sandbox's spec says. No Django."""

from __future__ import annotations

import os
from pathlib import Path

from sandboxes.backends.apptainer.files import shared_file
from sandboxes.backends.apptainer.skeleton import host_skeleton
from sandboxes.backends.bwrap_program import BUNDLE, ETC_FILES, HOME
from sandboxes.protocol import Root, RootKind, SandboxSpec

_NOBODY = 65534


def prepared_image(root: Root, spec: SandboxSpec, bundle: bytes, user: int | None) -> tuple[str, dict[str, str]]:
    """(path for Apptainer, paths inside with the host paths bound there); `user` is the host user of the sandboxes."""
    uid = 0 if spec.fakeroot else os.geteuid() if user is None else user
    files = {**ETC_FILES, **_identity_files(uid)}
    binds = {BUNDLE: str(shared_file("broker.pyz", bundle))}
    if root.kind is RootKind.HOST:
        skeleton, directories = host_skeleton({**files, BUNDLE: ""})
        return str(skeleton), {path: path for path in directories} | binds
    return root.path, {path: str(shared_file(Path(path).name, text.encode())) for path, text in files.items()} | binds


def _identity_files(uid: int) -> dict[str, str]:
    """The files of /etc that say who the agent is; `uid` is its number inside."""
    name = "root" if uid == 0 else "agent"
    users, groups = f"{name}:x:{uid}:{uid}:{name}:{HOME}:/bin/bash\n", f"{name}:x:{uid}:\n"
    if uid != _NOBODY:
        users += f"nobody:x:{_NOBODY}:{_NOBODY}:nobody:/:/bin/false\n"
        groups += f"nogroup:x:{_NOBODY}:\n"
    return {"/etc/passwd": users, "/etc/group": groups}
