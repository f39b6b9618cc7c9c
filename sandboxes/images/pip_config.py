"""How this node's pip finds packages, for the pip inside a sandbox: indexes, mirrors on disk, certificates. No Django."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sandboxes.images.job import Job
from sandboxes.protocol import Bind

FILES = "/opt/build/pip"  # inside

_SECONDS = 60.0
_PLAIN = ("index-url", "trusted-host", "timeout", "default-timeout", "retries", "no-index", "prefer-binary", "proxy")
_LOCATIONS = ("extra-index-url", "find-links")  # lists, of addresses and directories
_COPIED = ("cert", "client-cert", "constraint")  # files


@dataclass(frozen=True)
class PipConfig:
    """`env` may hold credentials. `files` are to be written to these paths inside, `binds` are directories of packages."""

    env: Mapping[str, str]
    files: Mapping[str, bytes]
    binds: tuple[Bind, ...]


async def read_pip_config(job: Job) -> PipConfig:
    """What `pip config` says on this node, and its proxies."""
    env = {name: value for name, value in os.environ.items() if name.lower() in ("http_proxy", "https_proxy", "no_proxy")}
    files: dict[str, bytes] = {}
    binds: dict[str, Bind] = {}
    for name, value in _merged(await _listed()).items():
        words = []
        for word in value.split() if name in (*_LOCATIONS, "constraint") else [value]:
            folder = _folder_of(word) if name in (*_LOCATIONS, "index-url") else None
            if folder is not None:
                binds[str(folder)] = Bind(str(folder), str(folder))
            if name in _COPIED and Path(word).is_file():
                inside = f"{FILES}/{len(files)}-{Path(word).name}"
                files[inside] = Path(word).read_bytes()
                word = inside
            words.append(word)
        env[f"PIP_{name.upper().replace('-', '_')}"] = " ".join(words)
    job.say(f"pip is told of: {', '.join(sorted(env)) or 'nothing'}")
    return PipConfig(env, files, tuple(binds.values()))


# How uv calls what pip is told. Indexes in directories are left out: it has them as lists of files.
_UV_NAMES = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_NO_INDEX": "UV_NO_INDEX",
    "PIP_TRUSTED_HOST": "UV_INSECURE_HOST",
    "PIP_CONSTRAINT": "UV_CONSTRAINT",
    "PIP_CERT": "SSL_CERT_FILE",
}


def uv_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The same for uv: variables made of those of a `PipConfig`."""
    found = {}
    for pip, uv in _UV_NAMES.items():
        words = [word for word in env.get(pip, "").split() if not (pip.endswith("INDEX_URL") and word.startswith("file:"))]
        if words:
            found[uv] = ("," if uv == "UV_FIND_LINKS" else " ").join(words)
    return found


def _merged(listed: str) -> dict[str, str]:
    """Options that matter here; the environment goes before the files."""
    found: dict[str, str] = {}
    for prefix in ("global.", ":env:."):
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name in (*_PLAIN, *_LOCATIONS, *_COPIED):
                found[name] = str(ast.literal_eval(value))
    return found


def _folder_of(location: str) -> Path | None:
    """The directory that has to be seen inside. An index's pages usually lead to files beside them."""
    parts = urlsplit(location)
    if parts.scheme not in ("", "file"):
        return None
    path = Path(unquote(parts.path))
    folder = path.parent if parts.scheme == "file" and path.name == "simple" else path
    return folder if folder.is_absolute() and folder.is_dir() and len(folder.parts) > 2 else None


async def _listed() -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pip", "config", "list"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return output.decode(errors="replace")
