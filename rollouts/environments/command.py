"""Any program as the agent: it finds its model in the usual variables, and leaves files behind."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from rollouts.environments.base import ModelAccess
from rollouts.environments.harness import FOLDER, INSTRUCTION_FILE, FileText, Harness, HarnessConfig, Program, RelativePath


class CommandConfig(HarnessConfig):
    """Settings of the command harness."""

    command: str = Field(
        min_length=1,
        max_length=10_000,
        pattern=r"^[^\x00]+$",
        description=f"Run by bash in `workdir`; the uploaded files are in {FOLDER}.",
    )
    instruction: Literal["argument", "stdin", "file"] = Field(
        "argument",
        description="How the agent gets it: one more argument, its standard input, or the file $PRORL_INSTRUCTION_FILE.",
    )
    files: dict[RelativePath, FileText] = Field({}, max_length=100, description=f"The agent's own files, put into {FOLDER}.")


class Command(Harness):
    """Starts what the configuration says."""

    config: ClassVar = CommandConfig

    def program(self, config: CommandConfig, task: Any, model: ModelAccess) -> Program:
        instruction = {"argument": f' "$(cat {INSTRUCTION_FILE})"', "stdin": f" <{INSTRUCTION_FILE}", "file": ""}
        return Program(
            command=config.command.rstrip() + instruction[config.instruction],
            files={f"{FOLDER}/{path}": text.encode() for path, text in config.files.items()},
            variables={},
        )
