"""Runs openhands-sdk's agent on one instruction, in the working directory. Needs openhands-sdk and openhands-tools only."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, Event, Tool
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool


def main(settings_file: str) -> int:
    settings = json.loads(Path(settings_file).read_text())
    llm = LLM(
        usage_id="agent",
        model=f"openai/{os.environ['PRORL_MODEL']}",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        native_tool_calling=settings["native_tool_calling"],
        # The gateway has tried by itself before it refuses.
        num_retries=2,
        retry_min_wait=1,
        retry_max_wait=4,
        timeout=None,
        input_cost_per_token=0.0,
        output_cost_per_token=0.0,
    )
    conversation = Conversation(
        agent=Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)]),
        workspace=Path.cwd(),
        max_iteration_per_run=settings["max_iterations"],
        callbacks=[_show],
        visualizer=None,
    )
    conversation.send_message(Path(os.environ["PRORL_INSTRUCTION_FILE"]).read_text())
    conversation.run()
    Path(settings["answer_file"]).write_text(get_agent_final_response(conversation.state.events))
    status = conversation.state.execution_status
    print(f"the agent's status: {status.value}")
    return 0 if status.value == "finished" else 1


def _show(event: Event) -> None:
    print(event, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
