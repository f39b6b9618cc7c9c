"""The `python` verb."""

from __future__ import annotations

import asyncio

from sandboxes.protocol import Limits, SandboxSpec
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal


@check("names survive between cells; the last expression's value comes back, None does not")
async def keeps_state(bench: Bench) -> None:
    async with bench.sandbox() as session:
        expect_equal(
            (await session.python("x = 6\ndef f(y): return x * y", timeout=10)).value, None, "the value of a definition"
        )
        expect_equal((await session.python("f(7)", timeout=10)).value, "42", "the value of a call")
        expect_equal((await session.python("None", timeout=10)).value, None, "the value of None")


@check("output is captured, also that of child processes, in order")
async def captures_output(bench: Bench) -> None:
    code = "import subprocess, sys\nprint('a', flush=True)\nsubprocess.run(['echo', 'b'])\nprint('c', file=sys.stderr)"
    async with bench.sandbox() as session:
        expect_equal((await session.python(code, timeout=10)).output, "a\nb\nc\n", "the output")


@check("a traceback shows the cell's own frames with their lines, and nothing of the machinery")
async def shows_tracebacks(bench: Bench) -> None:
    async with bench.sandbox() as session:
        error = (await session.python("def f():\n    raise ValueError('wrong')\nf()", timeout=10)).error or ""
        expect(error.endswith("ValueError: wrong"), f"the traceback is {error!r}")
        expect("raise ValueError('wrong')" in error, f"the traceback has no source lines: {error!r}")
        expect("broker" not in error and "worker" not in error, f"the traceback shows machinery: {error!r}")
        error = (await session.python("if:", timeout=10)).error or ""
        expect("SyntaxError" in error, f"a syntax error gave {error!r}")


@check("sys.exit is an error of its cell and loses nothing")
async def survives_sys_exit(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.python("x = 1", timeout=10)
        expect("SystemExit" in ((await session.python("import sys; sys.exit(2)", timeout=10)).error or ""), "no SystemExit")
        expect_equal((await session.python("x", timeout=10)).value, "1", "a name from before")


@check("a crash of the interpreter is reported as lost state; the next cell runs in a new one")
async def restarts_after_crash(bench: Bench) -> None:
    async with bench.sandbox() as session:
        for crash in ("import os; os._exit(7)", "import ctypes; ctypes.string_at(0)", "import os; os.kill(os.getpid(), 9)"):
            result = await session.python(crash, timeout=10)
            expect(result.restarted and "state is lost" in (result.error or ""), f"{crash!r} gave {result}")
            expect_equal((await session.python("1 + 1", timeout=10)).value, "2", "the next cell's value")


@check("a forked child that returns from its cell does not answer in its parent's place")
async def survives_fork(bench: Bench) -> None:
    async with bench.sandbox() as session:
        result = await session.python("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\npid > 0", timeout=10)
        expect_equal(result.value, "True", "the value in the parent")
        expect_equal((await session.python("pid > 0", timeout=10)).value, "True", "the next cell's value")


@check("output and values over the limit are cut")
async def cuts_long_output(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(output_bytes=1000))) as session:
        result = await session.python("print('x' * 100_000)\n'y' * 100_000", timeout=10)
        expect_equal(result.truncated_bytes, 100_001 - 1000, "the number of missing bytes")
        expect(len(result.output) < 1100 and len(result.value or "") < 1100, "output or value is longer than the limit")


@check("input() gets end-of-file at once, also for a password")
async def has_empty_stdin(bench: Bench) -> None:
    async with bench.sandbox() as session:
        for code in ("input()", "import getpass; getpass.getpass()", "import sys; sys.stdin.readline() or 1 / 0"):
            error = (await session.python(code, timeout=10)).error or ""
            expect("EOFError" in error or "ZeroDivisionError" in error, f"{code} gave {error!r}")


_DRAWN = """
import base64
class Drawn:
    def __repr__(self): return 'drawn'
class Png(Drawn):
    def _repr_png_(self): return b'png-data'
class Jpeg(Drawn):
    def _repr_jpeg_(self): return base64.b64encode(b'jpeg-data').decode(), {'width': 1}
class Svg(Drawn):
    def _repr_svg_(self): return '<svg/>'
class Bundle(Drawn):
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {'text/plain': 'x', 'image/png': base64.b64encode(b'bundled').decode()}
class Nothing(Drawn):
    def _repr_png_(self): return None
class Broken(Drawn):
    def _repr_png_(self): return 1 / 0
class Huge(Drawn):
    def _repr_png_(self): return bytes(5 * 1024 * 1024)
"""


@check("pictures come back as data: of the last value, of display(), in all forms that notebooks know")
async def shows_pictures(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.python(_DRAWN, timeout=10)
        result = await session.python("display(Jpeg(), Svg(), Bundle(), 'text', Nothing())\nPng()", timeout=10)
        expected = [
            ("image/jpeg", b"jpeg-data"),
            ("image/svg+xml", b"<svg/>"),
            ("image/png", b"bundled"),
            ("image/png", b"png-data"),
        ]
        expect_equal([(picture.mime, picture.data) for picture in result.pictures], expected, "the pictures")
        expect_equal((result.value, result.output, result.error), ("drawn", "'text'\ndrawn\n", None), "value and output")
        result = await session.python("Png", timeout=10)
        expect_equal((result.pictures, result.error), ((), None), "what a class gives")


@check("a picture that is too large or cannot be drawn is left out, and the output says so")
async def leaves_out_pictures(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.python(_DRAWN, timeout=10)
        result = await session.python("display(Huge(), Huge(), Broken())\nPng()", timeout=10)
        expect_equal([len(picture.data) for picture in result.pictures], [5 * 1024 * 1024, 8], "the sizes of the pictures")
        expect("5242880 bytes is left out" in result.output, f"the output is {result.output!r}")
        expect("could not be drawn: ZeroDivisionError" in result.output and result.error is None, f"it gave {result.output!r}")


@check("a running cell can be interrupted, and keeps the interpreter's state; without one nothing happens")
async def can_be_interrupted(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.interrupt_python()
        await session.python("x = 'kept'", timeout=10)
        await session.interrupt_python()
        begun = asyncio.Event()
        code = "import time\nprint('begun', flush=True)\ntime.sleep(600)"
        running = asyncio.create_task(session.python(code, timeout=600, on_output=lambda _: begun.set()))
        async with asyncio.timeout(20):
            await begun.wait()
            await session.interrupt_python()
            result = await running
        expect("KeyboardInterrupt" in (result.error or "") and not result.timed_out, f"the cell gave {result}")
        expect_equal((await session.python("x", timeout=10)).value, "'kept'", "a name from before")


@check("the interpreter can be restarted, also under a cell that hangs, which then says that the state is lost")
async def can_be_restarted(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.restart_python()
        await session.python("x = 1", timeout=10)
        await session.restart_python()
        expect("NameError" in ((await session.python("x", timeout=10)).error or ""), "a name survived the restart")
        begun = asyncio.Event()
        code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(1, flush=True)\nwhile True: pass"
        hanging = asyncio.create_task(session.python(code, timeout=600, on_output=lambda _: begun.set()))
        waiting = asyncio.create_task(session.python("'next'", timeout=10))
        async with asyncio.timeout(20):
            await begun.wait()
            await session.restart_python()
            result = await hanging
            expect(result.restarted and "state is lost" in (result.error or ""), f"the cell gave {result}")
            expect_equal((await waiting).value, "'next'", "the value of the cell that waited")
