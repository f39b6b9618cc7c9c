"""Who the agent is in a root file system: the files of /etc that say so. No Django."""

from __future__ import annotations

from pathlib import Path

from sandboxes.backends.roots.inside import exists, text_of

_AGENT = "agent"
_NOBODY = 65534
_SHELLS = ("/bin/bash", "/usr/bin/bash")


def identity_files(root: Path | None, uid: int, home: str) -> dict[str, str]:
    """Contents by path: the agent with the number `uid`, then the users and groups of the image at `root`, if there is one."""
    shell = next((path for path in _SHELLS if root is None or exists(root, path)), "/bin/sh")
    name = _AGENT if uid else "root"
    users = {"/etc/passwd": f"{name}:x:{uid}:{uid}:{name}:{home}:{shell}", "/etc/group": f"{name}:x:{uid}:"}
    nobody = {"/etc/passwd": f"nobody:x:{_NOBODY}:{_NOBODY}:nobody:/:/bin/false", "/etc/group": f"nogroup:x:{_NOBODY}:"}
    files = {path: _with_first(users[path], (root and text_of(root, path)) or nobody[path]) for path in users}
    if root and not uid and exists(root, "/etc/apt/apt.conf.d"):
        # apt would become another user to download, of which there is none besides root.
        files["/etc/apt/apt.conf.d/00sandbox"] = 'APT::Sandbox::User "root";\n'
    return files


def _with_first(line: str, text: str) -> str:
    name = line.partition(":")[0]
    others = [other for other in text.splitlines() if other.strip() and other.partition(":")[0] != name]
    return "\n".join([line, *others]) + "\n"
