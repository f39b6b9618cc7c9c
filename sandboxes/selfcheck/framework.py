"""How checks are written, registered and run."""

from __future__ import annotations

import ast
import contextlib
import enum
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.protocol import HOST, Backend, CommandResult, Root, SandboxSpec, Session

_CheckFunction = Callable[["Bench"], Awaitable[None]]


class Outcome(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # this host cannot tell, `detail` says why


@dataclass(frozen=True)
class Check:
    """One clause of the contract. `id` is GROUP.NAME."""

    id: str
    description: str
    run: _CheckFunction


@dataclass(frozen=True)
class CheckResult:
    """What became of a check; `detail` is empty when it passed."""

    id: str
    description: str
    outcome: Outcome
    seconds: float
    detail: str = ""


CHECKS: dict[str, Check] = {}


class CheckFailed(Exception):
    """The backend does not keep a clause of the contract."""


class CheckSkipped(Exception):
    """The clause cannot be examined on this host."""


def check(description: str) -> Callable[[_CheckFunction], _CheckFunction]:
    """Register an async function as a check."""

    def register(function: _CheckFunction) -> _CheckFunction:
        group = function.__module__.rpartition(".")[2]
        check_id = f"{group}.{function.__name__}"
        CHECKS[check_id] = Check(check_id, description, function)
        return function

    return register


def expect(condition: bool, problem: str) -> None:
    """Fail the check with `problem` unless the condition holds."""
    if not condition:
        raise CheckFailed(problem)


def expect_equal(actual: object, expected: object, what: str) -> None:
    expect(actual == expected, f"{what} is {actual!r} instead of {expected!r}")


def expect_output(result: CommandResult, expected: str) -> None:
    """The command succeeded and printed exactly `expected`."""
    expect(result.exit_code == 0 and result.output == expected, f"expected output {expected!r}, got {result}")


async def value_of(session: Session, code: str) -> Any:
    """What the last expression of a cell gave: numbers, texts, and lists of them."""
    result = await session.python(code, timeout=60)
    expect(result.error is None and result.value is not None, f"the code inside failed: {result}")
    return ast.literal_eval(result.value or "")


@dataclass
class Bench:
    """What a check works with."""

    backend: Backend

    def new_name(self) -> str:
        return f"selfcheck-{secrets.token_hex(6)}"

    @contextlib.asynccontextmanager
    async def sandbox(self, spec: SandboxSpec | None = None, name: str = "", root: Root = HOST) -> AsyncIterator[Session]:
        """A session to a new sandbox, which is stopped afterwards."""
        name = name or self.new_name()
        try:
            await self.backend.start(name, spec or SandboxSpec(), root)
            session = await self.backend.connect(name)
            try:
                yield session
            finally:
                await session.close()
        finally:
            await self.backend.stop(name)


def marker() -> str:
    """A string that occurs nowhere else; as an argument it makes a process findable from the host."""
    return f"marker-{secrets.token_hex(8)}"


def host_processes_with(text: str) -> list[int]:
    """Host pids of the processes with `text` in their arguments."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                if text.encode() in (directory / "cmdline").read_bytes():
                    found.append(int(directory.name))
    return found


async def run_check(check: Check, backend: Backend) -> CheckResult:
    """Never raises for a failing backend: an error of whatever kind is a failed check."""
    started = time.perf_counter()
    outcome, detail = Outcome.PASSED, ""
    try:
        await check.run(Bench(backend))
    except CheckSkipped as skipped:
        outcome, detail = Outcome.SKIPPED, str(skipped)
    except CheckFailed as failed:
        outcome, detail = Outcome.FAILED, str(failed)
    except Exception:
        outcome, detail = Outcome.FAILED, traceback.format_exc()
    return CheckResult(check.id, check.description, outcome, time.perf_counter() - started, detail)


async def run_checks(backend: Backend, report: Callable[[CheckResult], None] | None = None) -> list[CheckResult]:
    """Run all checks one after the other; `report` sees each result at once."""
    results = []
    for registered in CHECKS.values():
        result = await run_check(registered, backend)
        results.append(result)
        if report is not None:
            report(result)
    return results
