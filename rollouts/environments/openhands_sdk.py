"""The agent of openhands-sdk as it is on PyPI, with its terminal and its file editor, started by a driver of a few lines."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, ClassVar

from pydantic import Field

from rollouts.environments.base import ModelAccess
from rollouts.environments.harness import FOLDER, Harness, HarnessConfig, Program
from rollouts.environments.workspace import Workspace

_DRIVER = f"{FOLDER}/openhands_driver.py"
_SETTINGS = f"{FOLDER}/openhands.json"
_ANSWER_FILE = f"{FOLDER}/answer.txt"
# It tells nobody that it runs, and looks for nothing outside.
_VARIABLES = {
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "ANONYMIZED_TELEMETRY": "false",
    "LOG_LEVEL": "WARNING",
}


class OpenHandsConfig(HarnessConfig):
    """Settings of the openhands-sdk environment. The image has openhands-sdk and openhands-tools, see the guide."""

    python: str = Field(
        "/opt/agent/bin/python", min_length=1, max_length=300, pattern=r"^[\w./-]+$", description="That of the packages."
    )
    native_tool_calling: bool = Field(True, description="False: tools are described and called in text, by the agent itself.")
    max_iterations: int = Field(100, ge=1, le=10_000, description="Steps of the agent.")


class OpenHands(Harness):
    """Starts a conversation with one message, and waits for its end."""

    config: ClassVar = OpenHandsConfig

    def program(self, config: OpenHandsConfig, task: Any, model: ModelAccess) -> Program:
        settings = {
            "native_tool_calling": config.native_tool_calling,
            "max_iterations": config.max_iterations,
            "answer_file": _ANSWER_FILE,
        }
        driver = resources.files("rollouts.environments.drivers").joinpath("openhands_driver.py").read_bytes()
        return Program(
            command=f"{config.python} {_DRIVER} {_SETTINGS}",
            files={_DRIVER: driver, _SETTINGS: json.dumps(settings).encode()},
            variables=_VARIABLES,
        )

    async def answer(self, workspace: Workspace, config: OpenHandsConfig) -> str:
        """The file that was asked for, else the agent's last words."""
        return await super().answer(workspace, config) or await workspace.read(_ANSWER_FILE) or ""
