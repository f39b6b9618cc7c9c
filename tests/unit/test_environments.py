"""The shipped environments and the registry they are found in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollouts.engine.deadlines import Deadline
from rollouts.engine.errors import EnvironmentFailed
from rollouts.engine.records import TurnRecord
from rollouts.engine.stages import eval_stage, run_stage
from rollouts.environments import registry
from rollouts.environments.arithmetic import generate, last_integer
from rollouts.environments.base import EvalContext, PlainEnvironment, RewardComponent, RunContext, Score
from rollouts.environments.conformance import NoSandbox, check_environment
from rollouts.environments.errors import BrokenEnvironment, UnknownEnvironment, ValidationFailed
from rollouts.environments.python_packages import packages_binds
from rollouts.lifecycle import Cause
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.scripted.solver import solver
from rollouts.llm.types import Sampling, ServerAddress
from sandboxes.errors import SandboxStartFailed
from sandboxes.protocol import SandboxSpec

PROBLEMS = [json.loads(line) for line in (Path(__file__).parent.parent / "data" / "math.jsonl").read_text().splitlines()]


class Recording:
    """A store in memory."""

    def __init__(self) -> None:
        self.turns: list[TurnRecord] = []

    async def turn(self, record: TurnRecord) -> None:
        self.turns.append(record)


@asynccontextmanager
async def scripted_conversation(**server_settings: Any) -> AsyncIterator[Conversation]:
    client = ModelClient()
    async with ScriptedServer(**server_settings) as server:
        address = ServerAddress(server.url, server.model, "policy", 0, 8192)
        yield Conversation(client, FixedRoute(address), Sampling(), call_timeout=30.0)
        await client.close()


def test_the_shipped_environments_are_installed() -> None:
    assert {"arithmetic", "math"} <= set(registry.names())
    assert registry.get("math") is registry.get("math")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownEnvironment, match=r"'chess'.*arithmetic, .*math"):
        registry.get("chess")


def test_problems_are_located() -> None:
    with pytest.raises(ValidationFailed) as raised:
        registry.validate_config("math", {"max_turns": 0, "python_packages": ["sympy", 3], "a/b": 1})
    assert [problem.pointer for problem in raised.value.problems] == ["/max_turns", "/python_packages/1", "/a~1b"]
    assert "greater than or equal to 1" in raised.value.problems[0].message


def test_a_task_that_cannot_be_scored_is_refused_as_a_whole() -> None:
    with pytest.raises(ValidationFailed) as raised:
        registry.validate_task("math", {"question": "?", "expected_answer": "}{"})
    assert [problem.pointer for problem in raised.value.problems] == [""]


def test_problems_do_not_quote_the_document() -> None:
    with pytest.raises(ValidationFailed) as raised:
        registry.validate_task("math", {"question": "?", "expected_answer": ["the gold answer"]})
    assert "the gold answer" not in str(raised.value)


@pytest.mark.parametrize("name", ["arithmetic", "math"])
def test_schemas_describe_config_and_task(name: str) -> None:
    for schema in (registry.config_schema(name), registry.task_schema(name)):
        assert schema["type"] == "object" and schema["additionalProperties"] is False
        json.dumps(schema)


def test_every_real_problem_is_a_valid_task() -> None:
    for problem in PROBLEMS:
        assert registry.validate_task("math", problem)


async def test_math_passes_the_conformance_kit_on_real_problems() -> None:
    results = await check_environment("math", {}, PROBLEMS)

    assert len(results) == 4 * len(PROBLEMS)
    assert [result for result in results if not result.passed] == []


async def test_arithmetic_passes_the_conformance_kit() -> None:
    results = await check_environment("arithmetic", {}, generate(seed=1, count=20, max_value=99))

    assert [result for result in results if not result.passed] == []


async def test_the_kit_names_an_invalid_task() -> None:
    [result] = await check_environment("arithmetic", {}, [{"a": 1}])

    assert (result.check, result.passed) == ("task is valid", False) and "/b" in result.detail


class Careless(PlainEnvironment):
    """An environment whose scoring swallows every failure, as some do."""

    config = registry.get("arithmetic").config
    task = registry.get("arithmetic").task

    async def run(self, ctx: Any) -> Any: ...

    async def evaluate(self, ctx: EvalContext) -> Score:
        try:
            return Score([RewardComponent("correct", float(bool(ctx.artefacts["answer"])))])
        except OSError:
            return Score([RewardComponent("correct", 0.0)])


class Demanding(Careless):
    """An environment that wants a sandbox to score in."""

    evaluates_in_sandbox = True

    def sandbox_spec(self, config: Any, task: Any) -> Any:
        return SandboxSpec()


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("needs a licence")


class Inspecting(Demanding):
    """An environment that scores what it finds in its sandbox, and nothing else."""

    async def evaluate(self, ctx: EvalContext) -> Score:
        return Score([RewardComponent("correct", 0.0)])


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that offers the environments above, found the way any installed package is."""
    metadata = tmp_path / "careless-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: careless\nVersion: 1.0\n")
    lines = [
        f"careless = {__name__}:Careless",
        f"demanding = {__name__}:Demanding",
        f"inspecting = {__name__}:Inspecting",
        f"broken = {__name__}:Broken",
        "gone = no_such_module:Environment",
    ]
    (metadata / "entry_points.txt").write_text("[prorl.environments]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.get.cache_clear()
    registry._entry_points.cache_clear()
    yield
    registry.get.cache_clear()
    registry._entry_points.cache_clear()


@pytest.mark.usefixtures("installed")
async def test_the_kit_catches_scoring_that_swallows_failures() -> None:
    results = await check_environment("careless", {}, [{"a": 1, "b": 2}])

    assert [(r.check, r.passed) for r in results if "null" in r.check] == [("unreadable artefacts score null", False)]


@pytest.mark.usefixtures("installed")
async def test_the_kit_says_when_it_needs_a_sandbox() -> None:
    with pytest.raises(NoSandbox):
        await check_environment("demanding", {}, [{"a": 1, "b": 2}])


@pytest.mark.usefixtures("installed")
async def test_a_sandbox_that_does_not_start_is_no_result() -> None:
    @asynccontextmanager
    async def broken(spec: SandboxSpec) -> AsyncIterator[Any]:
        raise SandboxStartFailed("no room")
        yield

    with pytest.raises(NoSandbox, match="no room"):
        await check_environment("demanding", {}, [{"a": 1, "b": 2}], open_sandbox=broken)


@pytest.mark.usefixtures("installed")
async def test_an_environment_that_scores_its_sandbox_needs_no_artefacts() -> None:
    @asynccontextmanager
    async def anything(spec: SandboxSpec) -> AsyncIterator[Any]:
        yield object()

    results = await check_environment("inspecting", {}, [{"a": 1, "b": 2}], open_sandbox=anything)

    assert [result for result in results if not result.passed] == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "reason"), [("broken", "needs a licence"), ("gone", "no_such_module")])
def test_an_environment_that_does_not_load_is_listed_and_says_why(name: str, reason: str) -> None:
    assert name in registry.names()
    with pytest.raises(BrokenEnvironment, match=reason):
        registry.get(name)


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("2 + 5 = 7.", 7), ("-3", -3), ("It is 7, no, 8", 8), ("seven", None), ("", None), ("9" * 5000, None)],
)
def test_the_last_integer_counts(text: str, number: int | None) -> None:
    assert last_integer(text) == number


def test_generated_tasks_are_reproducible_and_valid() -> None:
    tasks = generate(seed=3, count=12, max_value=3)

    assert tasks == generate(seed=3, count=12, max_value=3) != generate(seed=4, count=12, max_value=3)
    assert len({(t["a"], t["b"]) for t in tasks}) == 9  # all there are
    for task in tasks:
        registry.validate_task("arithmetic", task)


@pytest.mark.parametrize(("accuracy", "reward"), [(1.0, 1.0), (0.0, 0.0)])
async def test_arithmetic_from_prompt_to_reward(accuracy: float, reward: float) -> None:
    env = registry.get("arithmetic")
    config = registry.validate_config("arithmetic", {})
    task = registry.validate_task("arithmetic", {"a": 2, "b": 3})
    async with scripted_conversation(script=solver(accuracy)) as conversation:
        ctx = RunContext(config, task, None, conversation, Recording())
        outcome = await run_stage(env, ctx, deadline=Deadline.after(30, "the test's time"))
    assert outcome.termination.cause is Cause.COMPLETED
    score = await eval_stage(
        env, EvalContext(config, task, outcome.artefacts, None), deadline=Deadline.after(30, "the test's time")
    )
    assert score.total == reward


@pytest.mark.parametrize("prompt", ["What is {a}?", "{b} + {a}", "x" * 2000])
def test_a_prompt_must_name_both_numbers(prompt: str) -> None:
    with pytest.raises(ValidationFailed):
        registry.validate_config("arithmetic", {"prompt": prompt})


def test_packages_for_a_sandbox_must_be_installed() -> None:
    assert [bind.target for bind in packages_binds(["sympy", "mpmath"])] == [
        "/opt/prorl/python/sympy",
        "/opt/prorl/python/mpmath",
    ]
    for name in ("no_such_package", "../etc", "six"):
        with pytest.raises(ValueError, match="no Python package"):
            packages_binds([name])


def test_a_config_that_names_a_missing_package_is_the_environments_failure() -> None:
    config = registry.validate_config("math", {"python_packages": ["no_such_package"]})
    with pytest.raises(EnvironmentFailed, match="no_such_package"):
        registry.get("math").sandbox_spec(config, registry.validate_task("math", PROBLEMS[0]))
