"""mini-swe-agent as it is on PyPI, through its own command line and configuration."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from rollouts.environments.base import ModelAccess
from rollouts.environments.harness import FOLDER, Harness, HarnessConfig, Program
from rollouts.environments.workspace import Workspace

_CONFIG_FILE = f"{FOLDER}/mini.yaml"
_TRAJECTORY_FILE = f"{FOLDER}/mini.traj.json"
_TRAJECTORY_BYTES = 10_000_000
# It asks for no settings, counts no dollars, and looks for nothing outside. A call that the gateway could not answer is asked
# for again a few times only: the gateway has tried by itself.
_VARIABLES = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": f"{FOLDER}/mini-swe-agent",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class MiniSweAgentConfig(HarnessConfig):
    """Settings of the mini-swe-agent environment. The image has the package installed, see the guide."""

    program: str = Field("mini", min_length=1, max_length=300, pattern=r"^[\w./-]+$", description="Its command in the image.")
    step_limit: int = Field(0, ge=0, le=10_000, description="Steps of the agent; 0 leaves it to `max_calls`.")
    command_timeout: int = Field(60, ge=1, le=86_400, description="Seconds for one command of the agent.")
    text_based: bool = Field(False, description="Commands in code blocks instead of tool calls.")
    overrides: dict[str, Any] = Field({}, description="More of its own configuration, merged over what is set here.")


class MiniSweAgent(Harness):
    """Starts `mini` without anybody to confirm what it does."""

    config: ClassVar = MiniSweAgentConfig

    def program(self, config: MiniSweAgentConfig, task: Any, model: ModelAccess) -> Program:
        settings = {
            "run": {"task": task.instruction},
            "agent": {"agent_class": "default", "step_limit": config.step_limit, "cost_limit": 0},
            "model": {
                "model_name": f"openai/{model.model}",
                "model_class": "litellm_textbased" if config.text_based else "litellm",
                "model_kwargs": {"api_base": f"{model.url}/v1", "drop_params": True},
            },
            "environment": {"timeout": config.command_timeout},
        }
        base = "mini_textbased" if config.text_based else "mini"
        overrides = f"{FOLDER}/overrides.yaml"
        return Program(
            command=f"{config.program} -c {base}.yaml -c {_CONFIG_FILE} -c {overrides} -o {_TRAJECTORY_FILE}",
            # JSON is YAML.
            files={_CONFIG_FILE: json.dumps(settings).encode(), overrides: json.dumps(config.overrides).encode()},
            variables=_VARIABLES,
        )

    async def answer(self, workspace: Workspace, config: MiniSweAgentConfig) -> str:
        """The file that was asked for, else what the agent submitted."""
        written = await super().answer(workspace, config)
        return written or _submission(await workspace.read(_TRAJECTORY_FILE, max_bytes=_TRAJECTORY_BYTES) or "")


def _submission(trajectory: str) -> str:
    """Of the agent's own record, which is a file that the agent could write to."""
    try:
        submission = json.loads(trajectory)["info"]["submission"]
    except (ValueError, KeyError, TypeError):
        return ""
    return submission if isinstance(submission, str) else ""
