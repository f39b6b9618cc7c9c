"""What an agent may still use, for the agent to see: as a tool, and as an environment variable in its sandbox."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from rollouts.engine.deadlines import Deadline
from rollouts.engine.tools import ToolArguments, ToolResult
from rollouts.llm.conversation import Conversation

# Unix seconds at which the agent's time runs out, whole ones, rounded down.
DEADLINE_VARIABLE = "PRORL_DEADLINE"


@dataclass
class Budget:
    """One rollout's remaining budget. `action_timeout` bounds one tool call (seconds); None leaves that to the environment."""

    deadline: Deadline
    conversation: Conversation
    action_timeout: float | None = None
    turns_left: int | None = None  # kept by the agent; None before its first turn

    def variables(self) -> dict[str, str]:
        """Environment variables for the sandbox. A moment, not a duration, because it would be wrong a second later."""
        return {DEADLINE_VARIABLE: str(int(time.time() + self.deadline.left))}

    def limit_action(self, seconds: float) -> float:
        """The shorter of a tool's own time limit and the run's."""
        return seconds if self.action_timeout is None else min(seconds, self.action_timeout)


class BudgetArguments(ToolArguments):
    """None."""


class BudgetTool:
    """Tells the model what it may still use. Tokens are those of its context, of which the coming reply takes its part."""

    name = "budget"
    description = "Return how many seconds, turns and tokens of context are left."
    arguments = BudgetArguments
    code_argument = None

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    async def call(self, arguments: BudgetArguments, *, timeout: float) -> ToolResult:
        left = {
            "seconds": int(self._budget.deadline.left),
            "turns": self._budget.turns_left,
            "context_tokens": self._budget.conversation.context_left,
        }
        return ToolResult(json.dumps(left))
