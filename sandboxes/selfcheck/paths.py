"""Tricks with paths in the file verbs: `..`, links, magic links, and links that appear while a request is served."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxes.errors import SandboxFileError
from sandboxes.protocol import Session
from sandboxes.selfcheck.attempts import host_file
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal, marker

_SWAPPER = """
import os, sys
os.mkdir("/tmp/race/directory")
for number, target in enumerate(sys.argv[1:]):
    os.symlink(target, f"/tmp/race/link{number}")
print("swaps", flush=True)
while True:
    for number in range(len(sys.argv) - 1):
        for source in ("/tmp/race/directory", f"/tmp/race/link{number}"):
            os.rename(source, "/tmp/race/place")
            os.rename("/tmp/race/place", source)
"""


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _disguises(path: Path) -> list[str]:
    """Ways to say a path of the host."""
    return [
        str(path),
        f"/proc/self/root{path}",
        f"/proc/1/root{path}",
        f"/proc/self/cwd/../../../..{path}",
        f"/tmp/../../../../../..{path}",
        f"../../../../../..{path}",
        f"~/../../../../..{path}",
        f"/dev/fd/0/../../../..{path}",
        f"/tmp/link-to-root{path}",
        f"/tmp/link-up{path}",
        "/tmp/link-to-file",
    ]


async def _plant_links(session: Session, path: Path) -> None:
    commands = f"ln -s /proc/1/root link-to-root; ln -s ../../../../../.. link-up; ln -s /proc/self/root{path} link-to-file"
    await session.bash(f"cd /tmp; {commands}", timeout=5)


@check("no path leads a reading file verb out of the sandbox")
async def reading_stays_inside(bench: Bench) -> None:
    with host_file(Path(tempfile.gettempdir())) as (path, secret):
        async with bench.sandbox() as session:
            await _plant_links(session, path)
            for name in _disguises(path):
                with contextlib.suppress(SandboxFileError):
                    data = await session.read_file(name)
                    expect(secret.encode() not in data, f"{name} could be read")
                with contextlib.suppress(SandboxFileError):
                    data = b"".join([piece async for piece in session.download(name)])
                    expect(secret.encode() not in data, f"{name} could be downloaded")
                with contextlib.suppress(SandboxFileError):
                    entries = [entry.path for entry in await session.list_files(str(Path(name).parent))]
                    expect(not any(path.name in entry for entry in entries), f"the directory of {name} could be listed")


@check("no path leads a writing file verb out of the sandbox")
async def writing_stays_inside(bench: Bench) -> None:
    with host_file(Path(tempfile.gettempdir())) as (path, secret):
        async with bench.sandbox() as session:
            await _plant_links(session, path)
            for name in _disguises(path):
                with contextlib.suppress(SandboxFileError):
                    await session.write_file(name, b"overwritten")
                with contextlib.suppress(SandboxFileError):
                    await session.upload(name, _pieces(b"overwritten"))
                expect_equal(path.read_text(), secret, f"the host's file after writing {name}")
            left = sorted(entry.name for entry in path.parent.iterdir() if "upload" in entry.name or path.name in entry.name)
            expect_equal(left, [path.name], "what is beside the host's file")


@check("a directory that becomes a link while it is used leads no file verb out of the sandbox")
async def races_stay_inside(bench: Bench) -> None:
    with host_file(Path(tempfile.gettempdir())) as (path, secret):
        targets = (f"/proc/1/root{path.parent}", f"/proc/self/root{path.parent}", "/etc", "/proc/self/fd")
        async with bench.sandbox() as session:
            await session.bash("mkdir /tmp/race", timeout=5)
            await session.write_file("/tmp/swap.py", _SWAPPER.encode())
            text = marker()
            swap = f"python3 -I /tmp/swap.py {' '.join(targets)} >/tmp/{text} 2>&1 &"
            command = f"{swap} until grep -qs swaps /tmp/{text}; do sleep 0.05; done"
            await session.bash(command, timeout=20)
            name = f"/tmp/race/place/{path.name}"
            for _ in range(100):
                with contextlib.suppress(SandboxFileError):
                    await session.write_file(name, b"overwritten")
                with contextlib.suppress(SandboxFileError):
                    await session.upload(name, _pieces(b"overwritten"))
                with contextlib.suppress(SandboxFileError):
                    expect(await session.read_file(name) != secret.encode(), "the host's file was read")
                with contextlib.suppress(SandboxFileError):
                    await session.list_files("/tmp/race/place")
            expect_equal(path.read_text(), secret, "the host's file")
            expect(await session.ping() < 5, "the broker does not answer")
