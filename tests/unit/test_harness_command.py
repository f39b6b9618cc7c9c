"""The command harness: programs of all sorts in a real sandbox, with a model URL and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.engine.errors import AttemptSuperseded, AttemptTimedOut, EnvironmentFailed, StoreFailed
from rollouts.environments import registry
from rollouts.environments.conformance import check_environment
from rollouts.environments.errors import ValidationFailed
from rollouts.lifecycle import Cause, Fidelity
from rollouts.llm.errors import ModelError
from rollouts.llm.route import FixedRoute, OneVersionRoute, Overtaken
from rollouts.llm.scripted.server import ScriptedServer
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.errors import SandboxLost
from sandboxes.protocol import SandboxSpec, Session
from tests.unit.harness_case import HarnessCase, tool_call

# An agent as somebody might have written it: it knows nothing but the variables of OpenAI's clients.
AGENT = """
import json, os, subprocess, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": os.environ["PRORL_MODEL"], "messages": messages, "tools": [TOOL]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": PARAMETERS}}
messages = [{"role": "user", "content": sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()}]
while True:
    reply = ask(messages)
    messages.append(reply)
    if not reply.get("tool_calls"):
        break
    for call in reply["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
open("answer.txt", "w").write(reply["content"])
print("done")
"""
CONFIG = {"command": "python3 /tmp/prorl/agent.py", "files": {"agent.py": AGENT}}
LOOK = """
import glob, os, urllib.error, urllib.request
def status(key):
    try:
        request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/models", headers={"x-api-key": key})
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code
key = os.environ["ANTHROPIC_API_KEY"]
told = any(key.encode() in open(name, "rb").read() for name in glob.glob("/proc/[0-9]*/cmdline"))
print(status(key), status("the-key-of-another-sandbox"), status(""), told)
"""


@pytest.fixture
async def model() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server


@pytest.fixture
def make(model: ScriptedServer, tmp_path: Path) -> Iterator[Any]:
    def make(config: dict[str, Any] | None = None, **settings: Any) -> HarnessCase:
        backend = BubblewrapBackend(tmp_path / "sandboxes")
        return HarnessCase(backend, model.address(), "command", CONFIG | (config or {}), **settings)

    return make


def says(*replies: str) -> str:
    return "".join(f"[[reply{turn}:{reply}]]" for turn, reply in enumerate(replies, start=1))


async def test_an_agent_works_with_tools_and_its_tokens_are_exact(make: Any):
    script = says(tool_call("bash", command="echo $((6 * 7))"), "It is 42.")
    played = await make().play(instruction=f"What is 6 * 7? {script}", expected_answer="It is 42.")
    assert played.outcome.termination.cause is Cause.COMPLETED
    assert played.outcome.fidelity is Fidelity.TOKEN_EXACT
    assert played.score.total == 1.0
    assert played.artefacts == {"exit_code": 0, "output": "done\n", "answer": "It is 42."}
    assert [message.role for message in played.recording.messages] == ["user", "assistant", "tool", "assistant"]
    (call,) = played.recording.tool_calls
    assert (call.name, call.arguments, call.output) == ("bash", {"command": "echo $((6 * 7))"}, "42\n")
    assert all(call.logprobs for call in played.recording.calls)


@pytest.mark.parametrize(
    ("instruction", "command"),
    [("stdin", "python3 /tmp/prorl/agent.py"), ("file", 'python3 /tmp/prorl/agent.py "$(cat $PRORL_INSTRUCTION_FILE)"')],
)
async def test_the_instruction_comes_as_the_agent_wants_it(make: Any, instruction: str, command: str):
    case = make({"instruction": instruction, "command": command})
    played = await case.play(instruction="Say it: 'a' \"b\" $c\n[[reply:yes]]", expected_answer="yes")
    assert played.score.total == 1.0
    assert played.recording.messages[0].content.startswith("Say it: 'a' \"b\" $c\n")


async def test_tests_that_the_agent_never_saw_judge_its_work(make: Any):
    write = tool_call("bash", command="ls > seen; echo 'def f(): return 2' > lib.py")
    payload = {
        "files": {"lib.py": "def f(): return 1\n", "sub/other.txt": "as it was"},
        "tests": "python3 check.py",
        "test_files": {"check.py": "import lib, os; assert lib.f() == 2 and os.path.exists('sub/other.txt')"},
    }
    case = make({"patch": True, "collect": ["seen", "missing"]})
    played = await case.play(instruction=says(write, "Fixed."), **payload)
    assert played.score.total == 1.0
    assert played.artefacts["files"] == {"seen": "lib.py\nseen\nsub\n", "missing": None}
    assert "-def f(): return 1\n+def f(): return 2" in played.artefacts["patch"]
    assert "other.txt" not in played.artefacts["patch"]

    worse = await make({"patch": True}).play(instruction=says("I will not."), **payload)
    assert worse.score.total == 0.0
    assert worse.artefacts["patch"] == worse.artefacts["patch"].replace("lib.py", "")
    assert "AssertionError" in worse.score.components[0].detail["output"]


async def test_what_was_left_can_be_rebuilt_from_the_patch(make: Any):
    write = tool_call("bash", command="git init -q . && echo 2 > new && git add new && printf '\\0\\1' > binary && rm old")
    case = make({"patch": True})
    payload = {"files": {"old": "x"}, "tests": "test ! -e old && grep 2 new && cmp binary <(printf '\\0\\1')"}
    played = await case.play(instruction=says(write, "Done."), **payload)
    assert played.score.total == 1.0, played.score
    task = registry.validate_task("command", {"instruction": "x", **payload})
    async with case.sandbox(task, "prorl-harness-2") as session:
        assert (await case.score(task, {}, session)).total == 0.0
        environment: Any = registry.get("command")
        await environment.restore(case.eval_context(task, played.artefacts, session))
        assert (await case.score(task, {}, session)).total == 1.0


async def test_an_agent_that_crashes_on_what_the_model_said_is_the_policys(make: Any):
    command = "python3 /tmp/prorl/agent.py hello && python3 -c 'raise ValueError(open(\"answer.txt\").read())' #"
    played = await make({"command": command}).play(instruction="x")
    assert played.outcome.termination.cause is Cause.COMPLETED
    assert played.outcome.termination.detail == "status 1: ValueError: hello"
    assert played.artefacts["exit_code"] == 1
    assert played.score.total == 0.0


@pytest.mark.parametrize("command", ["no-such-program", "exit 1 #", "true #"])
async def test_an_agent_that_never_asked_its_model_could_not_start(make: Any, command: str):
    with pytest.raises(EnvironmentFailed, match="made no model call") as failed:
        await make({"command": command}).play(instruction="Hello")
    assert not failed.value.retryable


async def test_an_agent_that_cannot_start_says_why(make: Any):
    with pytest.raises(EnvironmentFailed, match=r"status 127.*no-such-program"):
        await make({"command": "no-such-program"}).play(instruction="Hello")


async def test_an_agent_has_so_many_calls_and_no_more(make: Any):
    again = tool_call("bash", command="true")
    case = make({"max_calls": 2, "command": "while true; do python3 /tmp/prorl/agent.py"})
    case.config["command"] = "sh -c 'while true; do python3 /tmp/prorl/agent.py \"$1\"; done' agent"
    played = await case.play(instruction=says(again, again, again))
    assert played.outcome.termination.cause is Cause.MAX_TURNS
    assert len(played.recording.calls) == 2
    assert played.artefacts["exit_code"] is None


async def test_an_agent_that_ends_its_sandbox_has_done_nothing(make: Any):
    sandbox = {"limits": {"wall_seconds": 15}}
    case = make({"command": "python3 /tmp/prorl/agent.py hi; sleep 1000 #", "sandbox": sandbox})
    task = registry.validate_task("command", {"instruction": "x", **TESTED})
    async with case.sandbox(task) as session:
        outcome = await case.run(task, session)
    assert outcome.termination.cause is Cause.SANDBOX_LIMIT
    case.config["sandbox"] = {}
    async with case.sandbox(task, "prorl-harness-2") as session:
        environment: Any = registry.get("command")
        await environment.restore(case.eval_context(task, outcome.artefacts, session))
        assert (await case.score(task, outcome.artefacts, session)).total == 0.0


async def test_the_agents_time_is_bounded_and_its_work_kept(make: Any):
    command = "python3 /tmp/prorl/agent.py hello && echo $PRORL_DEADLINE > deadline && sleep 1000 #"
    case = make({"command": command, "collect": ["deadline"]}, seconds=15)
    played = await case.play(instruction="x")
    assert played.outcome.termination.cause is Cause.AGENT_TIMEOUT
    assert played.artefacts["answer"] == "hello"
    assert int(played.artefacts["files"]["deadline"]) > 0


async def test_the_attempts_time_is_not_the_agents_fault(make: Any):
    with pytest.raises(AttemptTimedOut):
        await make({"command": "sleep 1000 #"}, seconds=2, of_attempt=True).play(instruction="x")


async def test_a_process_that_is_left_behind_neither_holds_the_rollout_nor_sees_its_tests(make: Any):
    command = "setsid sleep 1000 & python3 /tmp/prorl/agent.py"
    tests = "! grep -aq 'sleep.100[0]' /proc/[0-9]*/cmdline"
    played = await make({"command": command}).play(instruction="Hello [[reply:hi]]", tests=tests)
    assert played.score.total == 1.0


async def test_a_model_server_that_fails_is_not_the_policys_fault(make: Any, model: ScriptedServer):
    with pytest.raises(ModelError):
        await make().play(instruction="Hello [[fail:500]]")


async def test_a_prompt_that_is_too_long_ends_the_episode(make: Any):
    long = tool_call("bash", command="head -c 60000 /dev/zero | tr '\\\\0' x")
    played = await make().play(instruction=says(long))
    assert played.outcome.termination.cause is Cause.CONTEXT_OVERFLOW
    assert len(played.recording.calls) == 1


@pytest.mark.parametrize(("error", "raised"), [(AttemptSuperseded("gone"), AttemptSuperseded), (OSError("x"), StoreFailed)])
async def test_a_call_that_cannot_be_stored_ends_the_agent_at_once(make: Any, error: Exception, raised: type[Exception]):
    case = make({"command": "python3 /tmp/prorl/agent.py x; sleep 1000 #"})
    case.recording.error = error
    with pytest.raises(raised):
        await case.play(instruction="x")


async def test_new_weights_end_an_agent_that_may_have_one_version_only(make: Any):
    case = make({"command": "until python3 /tmp/prorl/agent.py x; do sleep 0.1; done #"})
    case.route = OneVersionRoute(FixedRoute(case.address), case.address.policy_version + 1)
    with pytest.raises(Overtaken):
        await case.play(instruction="x")


async def test_the_death_of_the_sandbox_ends_the_model_calls(make: Any, model: ScriptedServer):
    case = make()
    task = registry.validate_task("command", {"instruction": "Hello [[delay:1000]]"})
    async with case.sandbox(task) as session:
        running = asyncio.create_task(case.run(task, session))
        while not model.running:
            await asyncio.sleep(0.01)
        await case.backend.stop("prorl-harness-1")
        with pytest.raises(SandboxLost):
            await running
        while model.running:
            await asyncio.sleep(0.01)
    assert model.aborted == 1


async def test_only_the_own_key_opens_the_model_and_no_program_sees_it_in_arguments(make: Any):
    case = make({"command": "python3 /tmp/prorl/look.py > codes; python3 /tmp/prorl/agent.py hello #", "collect": ["codes"]})
    case.config["files"] = {"agent.py": AGENT, "look.py": LOOK}
    played = await case.play(instruction="x")
    assert played.artefacts["files"]["codes"] == "200 401 401 False\n"


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ({"tests": "true", "expected_answer": "x"}, "leave one of them out"),
        ({"test_files": {"a": "b"}}, "`tests`, which are missing"),
        ({"gold_patch": "x"}, "`tests`, which are missing"),
        ({"expected_answer": "", "compare": "math"}, "/"),
        ({"files": {"/etc/passwd": "x"}}, "pattern"),
    ],
)
def test_tasks_that_cannot_be_judged_are_refused(payload: dict[str, Any], problem: str):
    with pytest.raises(ValidationFailed, match=problem):
        registry.validate_task("command", {"instruction": "x", **payload})


async def test_mathematical_answers_are_compared_as_such(make: Any):
    played = await make().play(instruction=r"[[reply:So \boxed{\frac{2}{4}}]]", expected_answer="0.5", compare="math")
    assert played.score.total == 1.0


GOLD = """diff --git a/lib.py b/lib.py
--- a/lib.py
+++ b/lib.py
@@ -1 +1 @@
-def f(): return 1
+def f(): return 2
"""
TESTED = {
    "instruction": "x",
    "files": {"lib.py": "def f(): return 1\n"},
    "tests": "python3 -c 'import lib; assert lib.f() == 2'",
}


async def test_the_conformance_kit_knows_what_a_good_agent_leaves(make: Any):
    case = make()
    tasks = [
        {"id": "patch", **TESTED, "gold_patch": GOLD},
        {"id": "wrong", **TESTED, "gold_patch": GOLD.replace("return 2", "return 3")},
        {"id": "unknown", **TESTED},
        {"id": "text", "instruction": "x", "expected_answer": "yes"},
        {"id": "math", "instruction": "x", "expected_answer": "1/2", "compare": "math"},
        {"id": "status", "instruction": "x"},
    ]

    @contextlib.asynccontextmanager
    async def open_sandbox(spec: SandboxSpec) -> AsyncIterator[Session]:
        await case.backend.start("prorl-kit", spec)
        session = await case.backend.connect("prorl-kit")
        try:
            yield session
        finally:
            await session.close()
            await case.backend.stop("prorl-kit")

    results = await check_environment("command", CONFIG, tasks, open_sandbox=open_sandbox)
    assert [(r.task, r.check) for r in results if not r.passed] == [("wrong", "gold solution scores 1")], results
    golden = [r.task for r in results if r.check == "gold solution scores 1"]
    assert golden == ["patch", "wrong", "text", "math", "status"]
