"""The editor: files are changed exactly as asked, or not at all."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
from collections.abc import Awaitable, Callable

from sandboxes.editor import Editor
from sandboxes.edits import EditError
from sandboxes.protocol import Limits, SandboxSpec
from sandboxes.selfcheck.framework import Bench, CheckFailed, check, expect, expect_equal, expect_output


async def _refused(call: Awaitable[str], said: str) -> None:
    try:
        shown = await call
    except EditError as error:
        expect(said in str(error), f"the refusal is {str(error)!r}, without {said!r}")
        return
    raise CheckFailed(f"it was not refused ({said!r}): {shown}")


@check("an edit keeps line endings, undecodable bytes, a missing last line ending, tabs and the file's mode")
async def keeps_what_it_does_not_change(bench: Bench) -> None:
    async with bench.sandbox() as session:
        editor = Editor(session)
        await session.write_file("/tmp/f", b"\tone\r\ntwo \xff\xfe\r\nthree")
        await session.bash("chmod 751 /tmp/f", timeout=5)
        await editor.replace("/tmp/f", "one\ntwo", "1\n2\n2b")
        expect_equal(await session.read_file("/tmp/f"), b"\t1\r\n2\r\n2b \xff\xfe\r\nthree", "the file")
        await editor.insert("/tmp/f", 4, "four\n")
        expect_equal(await session.read_file("/tmp/f"), b"\t1\r\n2\r\n2b \xff\xfe\r\nthree\r\nfour", "the longer file")
        expect_output(await session.bash("stat -c %a /tmp/f", timeout=5), "751\n")


@check("an edit through a link changes what the link leads to")
async def follows_links(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("cd /tmp && mkdir d && echo old > d/file && ln -s d/file link", timeout=5)
        await Editor(session).replace("/tmp/link", "old", "new")
        expect_output(await session.bash("cat /tmp/d/file; readlink /tmp/link", timeout=5), "new\nd/file\n")


@check("edits are taken back one by one, but not over somebody else's change")
async def takes_edits_back(bench: Bench) -> None:
    async with bench.sandbox() as session:
        editor = Editor(session)
        await editor.create("/tmp/a/f", "one\ntwo\n")
        await _refused(editor.undo("/tmp/a/f"), "no edit")
        await editor.replace("/tmp/a/f", "one", "1")
        await editor.insert("/tmp/a/f", 0, "zero")
        await editor.undo("/tmp/a/../a/f")
        expect_equal(await session.read_file("/tmp/a/f"), b"1\ntwo\n", "the file after one edit was taken back")
        await session.bash("echo three >> /tmp/a/f", timeout=5)
        await _refused(editor.undo("/tmp/a/f"), "changed by something else")
        expect_equal(await session.read_file("/tmp/a/f"), b"1\ntwo\nthree\n", "the file that something else changed")


@check("what cannot be done is refused with the reason, and changes nothing")
async def refuses_and_changes_nothing(bench: Bench) -> None:
    async with bench.sandbox() as session:
        editor = Editor(session)
        await session.bash("cd /tmp && mkdir d && seq 3 > f && printf 'x\\0y' > b && mkfifo p", timeout=5)
        await session.bash("truncate -s 3M /tmp/large; echo s > /tmp/s; chmod 0 /tmp/s", timeout=5)
        cases: list[tuple[Callable[[], Awaitable[str]], str]] = [
            (lambda: editor.view("f"), "not absolute"),
            (lambda: editor.view("/tmp/none"), "does not exist"),
            (lambda: editor.view("/tmp/f", 4, 5), "has 3 lines"),
            (lambda: editor.view("/tmp/d", 1, 2), "is a directory"),
            (lambda: editor.view("/tmp/b"), "binary"),
            (lambda: editor.view("/tmp/large"), "larger than 2 MiB"),
            (lambda: editor.view("/tmp/p"), "not a regular file"),
            (lambda: editor.view("/tmp/s"), "permission denied"),
            (lambda: editor.create("/tmp/f", "x"), "exists already"),
            (lambda: editor.create("/tmp/d", "x"), "is a directory"),
            (lambda: editor.create("/tmp/f/x", "x"), "not a directory"),
            (lambda: editor.create("/usr/x", "x"), "permission denied"),
            (lambda: editor.replace("/tmp/f", "4", "x"), "not in the file"),
            (lambda: editor.replace("/tmp/f", "\n", "x"), "3 times, at lines 1, 2, 3"),
            (lambda: editor.replace("/tmp/d", "4", "x"), "is a directory"),
            (lambda: editor.insert("/tmp/f", 4, "x"), "has 3 lines"),
            (lambda: editor.undo("/tmp/f"), "no edit"),
        ]
        for call, said in cases:
            await _refused(call(), said)
        expect_output(await session.bash("cd /tmp && ls -1 && cat f", timeout=5), "b\nd\nf\nlarge\np\ns\n1\n2\n3\n")


@check("a full disk leaves the file as it was")
async def survives_a_full_disk(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(disk_mb=2))) as session:
        await session.write_file("/tmp/f", b"x" * 900_000 + b"\nend\n")
        await session.write_file("/tmp/filler", b"x" * 1_000_000)
        await _refused(Editor(session).replace("/tmp/f", "end", "y" * 500_000), "no space")
        unchanged = await session.read_file("/tmp/f") == b"x" * 900_000 + b"\nend\n"
        expect(unchanged, "the file is not what it was before")
        listed = [entry.path for entry in await session.list_files("/tmp")]
        expect_equal(listed, ["/tmp/f", "/tmp/filler"], "the files in /tmp")


@check("a directory is shown two levels deep, without hidden entries")
async def shows_directories(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("mkdir -p /tmp/r/a/b/c /tmp/r/.git /tmp/r/a/.x && touch /tmp/r/f /tmp/r/a/b/deep", timeout=5)
        expect_equal(
            await Editor(session).view("/tmp/r"),
            "/tmp/r/a/\n/tmp/r/a/b/\n/tmp/r/f\n[2 hidden entries are not shown]",
            "the directory",
        )
