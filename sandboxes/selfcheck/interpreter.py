"""The `python` verb."""

from __future__ import annotations

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


@check("a cell that reads standard input gets end-of-file")
async def has_empty_stdin(bench: Bench) -> None:
    async with bench.sandbox() as session:
        expect("EOFError" in ((await session.python("input()", timeout=10)).error or ""), "input() did not raise EOFError")


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
