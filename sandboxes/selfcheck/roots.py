"""Root file systems: images as directories and SIF files, what may be changed in them, and where the changes end."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxes.protocol import Changes, Limits, Root, SandboxSpec, Session
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal, expect_output
from sandboxes.selfcheck.samples import FACT, TEXT, USER, digest_of, directory_root, sif_root

_LOOK = f"cat {FACT} /srv/link /srv/closed/file; ls -1 /srv"
_UNCHANGED = f"{TEXT}{TEXT}{TEXT}closed\nfact\nlink\n"
_CHANGE = (
    f"set -e; echo changed > {FACT}; rm /srv/link; mkdir /srv/new; echo mine > /srv/new/file; chmod 755 /srv/closed; "
    "mv /srv/closed/file /srv/moved; rm -r /srv/closed; echo x >> /etc/group; echo '#!/bin/sh' > /bin/ln"
)
_LOOK_AT_CHANGES = f"cat {FACT} /srv/new/file /srv/moved; ls -1 /srv"
_CHANGED = f"changed\nmine\n{TEXT}fact\nmoved\nnew\n"
_ATTEMPTS = """
import os
done = []
for attempt in (
    "os.mknod('/tmp/sda', 0o60666, os.makedev(8, 0))",
    "os.chroot('/tmp')",
    "open('/proc/sys/kernel/core_pattern', 'w').write('x')",
    "open('/proc/1/mem', 'rb')",
):
    try:
        eval(attempt)
        done.append(attempt)
    except OSError:
        pass
done
"""


@contextlib.asynccontextmanager
async def _each_root(bench: Bench, spec: SandboxSpec) -> AsyncIterator[list[tuple[Root, Session]]]:
    """A sandbox of each kind of image, side by side."""
    async with contextlib.AsyncExitStack() as stack:
        roots = [directory_root(), sif_root()]
        yield [(root, await stack.enter_async_context(bench.sandbox(spec, root=root))) for root in roots]


@check("a directory and a SIF file serve as root: their files, not the host's; the agent has a home and is one of their users")
async def serves_images(bench: Bench) -> None:
    async with _each_root(bench, SandboxSpec()) as sandboxes:
        for _, session in sandboxes:
            expect_output(await session.bash(_LOOK, timeout=5), _UNCHANGED)
            expect_output(await session.bash("ls -d /usr/bin /etc/shadow /boot 2>/dev/null; ls /home", timeout=5), "agent\n")
            expect_output(await session.bash(f"id -un {USER}; grep -c '^root:' /etc/passwd", timeout=5), f"{USER}\n1\n")
            expect_output(await session.bash("cd; echo a > file; cat $HOME/file ~/file; echo b > /tmp/b", timeout=5), "a\na\n")


@check("bash and Python work in an image that has neither, with all their state")
async def lends_programs(bench: Bench) -> None:
    code = f"subprocess.run(['/bin/cat', '{FACT}'], capture_output=True, text=True).stdout"
    async with _each_root(bench, SandboxSpec()) as sandboxes:
        for _, session in sandboxes:
            await session.bash("cd /srv; declare -A map=([key]=value)", timeout=5)
            expect_output(await session.bash("pwd; echo ${map[key]}", timeout=5), "/srv\nvalue\n")
            await session.python("import json, os, sqlite3, ssl, subprocess", timeout=20)
            expect_equal((await session.python(code, timeout=20)).value, repr(TEXT), "what a program of the image printed")
            await session.write_file("/srv/from-outside", TEXT.encode())
            expect_output(await session.bash("cat /srv/from-outside", timeout=5), TEXT)


@check("an image's variables are set, but not those that are the sandbox's own; the spec's replace them")
async def sets_variables_of_images(bench: Bench) -> None:
    show, changed = "echo $FROM_IMAGE $HOME", SandboxSpec(env={"FROM_IMAGE": "no"})
    async with bench.sandbox(root=directory_root()) as one, bench.sandbox(changed, root=sif_root()) as two:
        expect_output(await one.bash(show, timeout=5), "yes /home/agent\n")
        expect_output(await two.bash(show, timeout=5), "no /home/agent\n")


async def _changes_end_with_the_sandbox(bench: Bench, changes: Changes) -> None:
    tree, file = Path(directory_root().path), Path(sif_root().path)
    before = digest_of(tree), file.read_bytes()
    spec = SandboxSpec(changes=changes)
    async with _each_root(bench, spec) as changed, _each_root(bench, spec) as others:
        for (root, session), (_, other) in zip(changed, others, strict=True):
            result = await session.bash(_CHANGE, timeout=5)
            expect(result.exit_code == 0, f"a {root.kind} could not be changed: {result}")
            expect_output(await session.bash(_LOOK_AT_CHANGES, timeout=5), _CHANGED)
            expect_output(await other.bash(_LOOK, timeout=5), _UNCHANGED)
    expect((digest_of(tree), file.read_bytes()) == before, "an image has changed")
    async with _each_root(bench, spec) as sandboxes:
        for _, session in sandboxes:
            expect_output(await session.bash(_LOOK, timeout=5), _UNCHANGED)


@check("what is changed in an image in memory is seen by that sandbox only, and ends with it")
async def keeps_changes_in_memory(bench: Bench) -> None:
    await _changes_end_with_the_sandbox(bench, Changes.MEMORY)


@check("what is changed in an image on disk is seen by that sandbox only, and ends with it, whatever its permissions are")
async def keeps_changes_on_disk(bench: Bench) -> None:
    await _changes_end_with_the_sandbox(bench, Changes.DISK)
    name = bench.new_name()
    async with bench.sandbox(SandboxSpec(changes=Changes.DISK), name=name, root=directory_root()) as session:
        expect_output(await session.bash("mkdir -p /srv/a/b; echo x > /srv/a/b/c; chmod 0 /srv/a/b /srv/a", timeout=5), "")
        await bench.backend.stop(name)
        expect(not (bench.backend.state_dir / name).exists(), "files are left")


@check("an image can be refused to change; the home and /tmp can still be written")
async def refuses_changes(bench: Bench) -> None:
    write = f"for f in {FACT} /new /srv/new /etc/group /bin/ln; do echo x > $f && echo $f; done; rm -f /srv/link"
    async with _each_root(bench, SandboxSpec(changes=Changes.REFUSED)) as sandboxes:
        for root, session in sandboxes:
            result = await session.bash(f"{{ {write}; }} 2>/dev/null", timeout=5)
            expect_equal(result.output, "", f"the list of files of a {root.kind} that could be written")
            expect_output(await session.bash(_LOOK, timeout=5), _UNCHANGED)
            expect_output(await session.bash("echo a > ~/a; echo b > /tmp/b; cat ~/a /tmp/b", timeout=5), "a\nb\n")


@check("changes to an image in memory have a size, which is that of disk_mb")
async def bounds_changes_in_memory(bench: Bench) -> None:
    spec = SandboxSpec(limits=Limits(disk_mb=8), changes=Changes.MEMORY)
    async with bench.sandbox(spec, root=directory_root()) as session:
        result = await session.bash("dd if=/dev/zero of=/srv/big bs=1M count=32", timeout=20)
        expect(result.exit_code != 0, f"32 MiB were written: {result}")
        size = int((await session.bash("stat -c %s /srv/big", timeout=5)).output)
        expect(size <= 8 * 2**20, f"{size} bytes were written")


@check("root inside owns the image's files and is bound like any agent")
async def serves_root_inside(bench: Bench) -> None:
    async with _each_root(bench, SandboxSpec(fakeroot=True)) as sandboxes:
        for _, session in sandboxes:
            result = await session.bash("id -u; id -un; stat -c %u /srv/closed /bin/sh ~", timeout=5)
            expect_output(result, "0\nroot\n0\n0\n0\n")
            result = await session.bash(f"chown 0:0 {FACT} && chmod 0 {FACT} && cat {FACT}; echo x > /bin/ln", timeout=5)
            expect_output(result, TEXT)
            done = await session.python(_ATTEMPTS, timeout=20)
            expect_equal(done.value, "[]", "the list of things that root could do")


@check("many sandboxes of one image may start at once")
async def starts_many_of_one_image(bench: Bench) -> None:
    names = [bench.new_name() for _ in range(8)]

    async def look(name: str) -> str:
        async with bench.sandbox(name=name, root=sif_root()) as session:
            return (await session.bash(f"echo {name} > {FACT}; cat {FACT}", timeout=20)).output

    expect_equal(await asyncio.gather(*map(look, names)), [f"{name}\n" for name in names], "what the sandboxes read back")
