"""Agents as they are on PyPI, in images built as the guide says, carried through by real workers with a scripted model.

The images take most of the time: about a minute and a half on two idle cores. They are built once for all tests.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.acceptance.conftest import scripted
from tests.acceptance.platform import Platform, running_platform
from tests.unit.harness_case import tool_call

GUIDE = (Path(__file__).resolve().parents[2] / "docs/guide/harnesses.md").read_text()
BUILD_SECONDS = 900.0
REGISTER = """
import json
from sandboxes.images.services import builds, registry
for name, kind, source in json.loads({images!r}):
    image = registry.register_image(name=name, kind=kind, source=json.loads(source))
builds.request_build(image=image)
"""
SETUP = """
import json
from rollouts.models import Project
from rollouts.services import registry, servers
project = Project.objects.create(name="alpha")
servers.register_server(project=project, url={url!r}, policy="scripted")
for name, handler, config in json.loads({environments!r}):
    registry.create_environment(project=project, name=name, handler=handler, config=config)
"""
SERVE = """
from rollouts.models import Project
from rollouts.services.servers import register_server
register_server(project=Project.objects.get(), url={url!r}, policy="real")
"""
SUBMIT = """
import json
from rollouts.models import Project
from rollouts.services import submit
settings = {{"sampling": {{"max_tokens": 64 if {policy!r} == "real" else 400}}}}
run = submit.create_run(project=Project.objects.get(), name="run", policy={policy!r}, settings=settings)
groups = [submit.GroupRequest(n=1, environment={environment!r}, payload=json.loads({payload!r}))]
submit.submit_groups(run=run, groups=groups)
print(json.dumps(str(run.id)))
"""
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FIX = "echo 'def f(): return 2' > lib.py; ls"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


def recipes() -> list[list[str]]:
    """Name, kind and settings of the images that the guide registers."""
    lines = [shlex.split(line) for line in blocks("console")[0].splitlines() if " images register " in line]
    return [words[words.index("register") + 1 :] for words in lines]


TASK: dict[str, Any] = next(found for found in map(json.loads, blocks("json")) if "instruction" in found)
CONFIG: dict[str, Any] = next(found for found in map(json.loads, blocks("json")) if "patch" in found)


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    yield from scripted("--max-model-len", "65536")


@contextlib.contextmanager
def roomy_folder() -> Iterator[Path]:
    """In memory where there is enough: it gets tens of thousands of files, which some disks take minutes to remove."""
    memory = Path("/dev/shm")  # noqa: S108 - only the place for a directory of our own
    enough = memory.is_dir() and min(shutil.disk_usage(memory).free, psutil.virtual_memory().available) > 8 << 30
    with tempfile.TemporaryDirectory(prefix="prorl-harnesses-", dir=memory if enough else None) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def platform(model: str) -> Iterator[Platform]:
    """With the guide's images, and an environment of each handler."""
    agent = {"command": "/opt/agent/bin/python /tmp/prorl/agent.py", "files": {"agent.py": blocks("python")[0]}}
    environments = [
        ("mini", "mini-swe-agent", CONFIG),
        ("mini-text", "mini-swe-agent", CONFIG | {"text_based": True}),
        ("openhands", "openhands-sdk", CONFIG),
        ("own", "command", CONFIG | agent),
        ("mini-of-three-calls", "mini-swe-agent", CONFIG | {"max_calls": 3}),
    ]
    with roomy_folder() as folder, running_platform(folder / "platform", image_dir=folder / "images") as running:
        running.manage("shell", "--no-imports", "-c", REGISTER.format(images=json.dumps(recipes())))
        running.start_execution(concurrency=2)
        running.spawn("maintenance", "django", "maintain", "--builds", "1")
        ended = "SELECT state IN ('ready', 'failed') FROM sandboxes_image WHERE name = 'agents'"
        running.wait_for(lambda: running.value(ended), "the image of the agents", timeout=BUILD_SECONDS)
        assert running.value("SELECT string_agg(error, '') FROM sandboxes_imagebuild") == ""
        running.manage("shell", "--no-imports", "-c", SETUP.format(url=model, environments=json.dumps(environments)))
        yield running


@pytest.fixture(scope="module")
def real_platform(platform: Platform, vllm_url: str) -> Platform:
    """With vLLM and a tiny model, which says anything at all."""
    platform.manage("shell", "--no-imports", "-c", SERVE.format(url=vllm_url))
    return platform


def play(platform: Platform, environment: str, *replies: str, policy: str = "scripted") -> dict[str, Any]:
    """Let the scripted model give these replies to the guide's task; the rollout's row when it has ended."""
    script = "".join(f"[[reply{turn}:{reply}]]" for turn, reply in enumerate(replies, start=1))
    payload = json.dumps(TASK | {"instruction": f"{TASK['instruction']} {script}"})
    run = platform.shell(SUBMIT.format(environment=environment, payload=payload, policy=policy))
    platform.wait_until_all_finished(timeout=300)
    return platform.rows("SELECT * FROM rollouts_rollout WHERE run_id = %s", run)[0]


def check(platform: Platform, rollout: dict[str, Any], *, calls: int, tools: list[str]) -> None:
    """It fixed the bug, and its trajectory is as that of the shipped agent."""
    assert rollout["state"] == "succeeded", (rollout["termination_detail"], platform.tails())
    assert (rollout["reward"], rollout["fidelity"], rollout["turns"]) == (1.0, "token-exact", calls), rollout["artefacts"]
    assert "+def f(): return 2" in rollout["artefacts"]["patch"]
    stored = platform.rows("SELECT * FROM rollouts_modelcall WHERE rollout_id = %s ORDER BY turn", rollout["id"])
    assert all(call["sampled_ids"] and call["logprobs"] for call in stored)
    used = platform.rows("SELECT * FROM rollouts_toolcall WHERE rollout_id = %s ORDER BY turn, index", rollout["id"])
    assert [tool["name"] for tool in used] == tools
    assert all("lib.py" in tool["output"] for tool in used[:-1])  # nobody told the model what came of the last one
    assert "0 wrong" in platform.manage("check_tokens", "--run", str(rollout["run_id"]))


def test_mini_swe_agent(platform: Platform):
    submit = tool_call("bash", command=f"{DONE}; echo fixed")
    rollout = play(platform, "mini", tool_call("bash", command=FIX), submit)
    check(platform, rollout, calls=2, tools=["bash", "bash"])
    assert rollout["artefacts"]["answer"] == "fixed\n"


def test_mini_swe_agent_without_tool_calls(platform: Platform):
    first, last = (f"THOUGHT: x\n\n```mswea_bash_command\n{command}\n```" for command in (FIX, DONE))
    check(platform, play(platform, "mini-text", first, last), calls=2, tools=[])


def test_openhands(platform: Platform):
    finish = tool_call("finish", message="It returns 2 now.")
    rollout = play(platform, "openhands", tool_call("terminal", command=FIX), finish)
    check(platform, rollout, calls=2, tools=["terminal", "finish"])
    assert rollout["artefacts"]["answer"] == "It returns 2 now."


def test_the_guides_own_agent(platform: Platform):
    rollout = play(platform, "own", f"```bash\n{FIX}\n```", "DONE")
    check(platform, rollout, calls=2, tools=[])
    assert rollout["artefacts"]["answer"] == "DONE\n"


def test_what_a_real_model_says_is_data(real_platform: Platform):
    rollout = play(real_platform, "mini-of-three-calls", policy="real")
    assert (rollout["state"], rollout["reward"]) == ("succeeded", 0.0), (rollout["termination_detail"], real_platform.tails())
    assert rollout["termination_cause"] in ("max_turns", "context_overflow", "completed")
    assert rollout["turns"] >= 1
    assert "0 wrong" in real_platform.manage("check_tokens", "--run", str(rollout["run_id"]))


def test_a_prompt_that_is_longer_than_a_real_models_context(real_platform: Platform):
    rollout = play(real_platform, "openhands", policy="real")
    assert (rollout["state"], rollout["reward"]) == ("succeeded", 0.0), (rollout["termination_detail"], real_platform.tails())
    assert rollout["termination_cause"] == "context_overflow"
