"""One file per noun; the nouns are those of the README's vocabulary."""

from .environment import Dataset, Environment, Task
from .feed import FeedCursor
from .idempotency import IdempotentResponse
from .llm_server import LLMServer, Policy
from .node import WorkerProcess
from .project import ApiKey, Project, Scope
from .rollout import Attempt, Rollout, RolloutEvent
from .run import Group, Run
from .trajectory import Message, ModelCall, Reward, ToolCall

__all__ = [
    "ApiKey",
    "Attempt",
    "Dataset",
    "Environment",
    "FeedCursor",
    "Group",
    "IdempotentResponse",
    "LLMServer",
    "Message",
    "ModelCall",
    "Policy",
    "Project",
    "Reward",
    "Rollout",
    "RolloutEvent",
    "Run",
    "Scope",
    "Task",
    "ToolCall",
    "WorkerProcess",
]
