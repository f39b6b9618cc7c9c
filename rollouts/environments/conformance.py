"""What every environment must do, checked on real tasks. `manage.py check_environment NAME` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, NamedTuple, NoReturn

from rollouts.engine.deadlines import Deadline
from rollouts.engine.errors import classify, describe
from rollouts.engine.stages import eval_stage, init_stage, restore_stage
from rollouts.environments.base import (
    ANSWER,
    Environment,
    EvalContext,
    InitContext,
    KnowsGoldAnswer,
    KnowsGoldArtefacts,
    RestoresSandbox,
)
from rollouts.environments.errors import ValidationFailed
from rollouts.environments.registry import get, validate_config, validate_task
from rollouts.lifecycle import Blame, Phase
from sandboxes.errors import SandboxError
from sandboxes.protocol import SandboxSpec, Session

_SECONDS = 120.0  # for one stage

OpenSandbox = Callable[[SandboxSpec], AbstractAsyncContextManager[Session]]


class CheckResult(NamedTuple):
    """One check of one task. `detail` says what was found instead."""

    check: str
    task: str
    passed: bool
    detail: str = ""


class NoSandbox(Exception):
    """The sandbox that the environment asks for cannot be had, so nothing can be checked."""


async def check_environment(
    handler: str,
    config: Mapping[str, Any],
    tasks: Sequence[Mapping[str, Any]],
    *,
    open_sandbox: OpenSandbox | None = None,
) -> list[CheckResult]:
    """Check that a gold solution scores 1, an empty answer scores 0, and artefacts that cannot be read score null.

    `open_sandbox` is needed by environments that evaluate in one. Raises `UnknownEnvironment`, `BrokenEnvironment`,
    `ValidationFailed` for the config, `NoSandbox`.
    """
    env = get(handler)
    checker = _Checker(env, validate_config(handler, config), open_sandbox)
    results = []
    for index, document in enumerate(tasks):
        name = str(document.get("id") or index)
        try:
            task = validate_task(handler, document)
        except ValidationFailed as exc:
            results.append(CheckResult("task is valid", name, False, str(exc)))
            continue
        results.append(CheckResult("task is valid", name, True))
        if (gold := _gold(env, task)) is not None:
            results.append(await checker.scores("gold solution scores 1", name, task, gold, 1.0, restored=True))
        results.append(await checker.scores("empty answer scores 0", name, task, {ANSWER: ""}, 0.0))
        results.append(await checker.unreadable_artefacts_score_null(name, task))
    return results


def _gold(env: Environment, task: Any) -> Mapping[str, Any] | None:
    """What a good agent leaves, where the environment knows it."""
    if isinstance(env, KnowsGoldArtefacts):
        return env.gold_artefacts(task)
    return {ANSWER: env.gold_answer(task)} if isinstance(env, KnowsGoldAnswer) else None


class _Checker:
    def __init__(self, env: Environment, config: Any, open_sandbox: OpenSandbox | None) -> None:
        self._env = env
        self._config = config
        self._open_sandbox = open_sandbox

    async def scores(
        self,
        check: str,
        name: str,
        task: Any,
        artefacts: Mapping[str, Any],
        expected: float | None,
        *,
        restored: bool = False,
    ) -> CheckResult:
        """Whether these artefacts get the expected total reward; with `restored`, in the sandbox that they describe."""
        try:
            total = await self._total(task, artefacts, restored)
        except NoSandbox:
            raise
        except Exception as exc:
            blamed = classify(exc, Phase.EVAL).termination.blame
            return CheckResult(check, name, expected is None and blamed is Blame.INFRASTRUCTURE, describe(exc))
        return CheckResult(check, name, total == expected, f"total reward {total}")

    async def unreadable_artefacts_score_null(self, name: str, task: Any) -> CheckResult:
        """An environment that looks only at its sandbox swallows nothing when it scores as if nothing had happened."""
        artefacts = _Unreadable()
        result = await self.scores("unreadable artefacts score null", name, task, artefacts, None)
        if self._env.evaluates_in_sandbox and not artefacts.asked_for:
            return result._replace(passed=True, detail="it asks for none")
        return result

    async def _total(self, task: Any, artefacts: Mapping[str, Any], restored: bool) -> float | None:
        """INIT and EVAL as the workers do them; INIT is left out where its sandbox cannot be had and EVAL does not need it."""
        spec = self._env.sandbox_spec(self._config, task)
        if spec is None or self._open_sandbox is None:
            if spec is not None and self._env.evaluates_in_sandbox:
                raise NoSandbox("this environment evaluates in a sandbox")
            if spec is None:
                await init_stage(self._env, InitContext(self._config, task, None), deadline=_deadline())
            return await self._evaluated(task, artefacts, None)
        async with AsyncExitStack() as stack:
            try:
                sandbox = await stack.enter_async_context(self._open_sandbox(spec))
            except SandboxError as exc:
                raise NoSandbox(f"the sandbox that this environment asks for cannot be had: {exc}") from exc
            await init_stage(self._env, InitContext(self._config, task, sandbox), deadline=_deadline())
            if restored and isinstance(self._env, RestoresSandbox):
                left_behind = EvalContext(self._config, task, artefacts, sandbox)
                await restore_stage(self._env, left_behind, deadline=_deadline())
            return await self._evaluated(task, artefacts, sandbox if self._env.evaluates_in_sandbox else None)

    async def _evaluated(self, task: Any, artefacts: Mapping[str, Any], sandbox: Session | None) -> float | None:
        score = await eval_stage(self._env, EvalContext(self._config, task, artefacts, sandbox), deadline=_deadline())
        return score.total


def _deadline() -> Deadline:
    return Deadline.after(_SECONDS, f"a stage's {_SECONDS:g} s")


class _Unreadable(Mapping[str, Any]):
    """Artefacts whose store is down: an environment that scores them has swallowed an infrastructure failure."""

    def __init__(self) -> None:
        self.asked_for = False

    def _fail(self) -> NoReturn:
        self.asked_for = True
        raise OSError("these artefacts cannot be read")

    def __getitem__(self, key: str) -> Any:
        self._fail()

    def __iter__(self) -> Iterator[str]:
        self._fail()

    def __len__(self) -> int:
        self._fail()
