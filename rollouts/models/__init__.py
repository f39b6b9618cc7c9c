"""One file per noun; the nouns are those of the README's vocabulary."""

from .blob import Blob, BlobUnreadable, blob_storage
from .environment import Dataset, Environment, Task
from .feed import FeedCursor
from .idempotency import IdempotentResponse
from .llm_server import LLMServer, Policy, PolicyVersion
from .metric import MetricSeries
from .node import Draining, Node, RescuerPass, WorkerProcess
from .project import ApiKey, Project, Scope
from .rescore import Rescoring
from .rollout import Attempt, Rollout, RolloutEvent
from .run import Group, Run
from .session import Session
from .stage_failure import StageFailure
from .tally import RunTally
from .trajectory import Message, MessagePicture, ModelCall, Reward, ToolCall, ToolPicture
from .webhook import WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookEvent

__all__ = [
    "ApiKey",
    "Attempt",
    "Blob",
    "BlobUnreadable",
    "Dataset",
    "Draining",
    "Environment",
    "FeedCursor",
    "Group",
    "IdempotentResponse",
    "LLMServer",
    "Message",
    "MessagePicture",
    "MetricSeries",
    "ModelCall",
    "Node",
    "Policy",
    "PolicyVersion",
    "Project",
    "Rescoring",
    "RescuerPass",
    "Reward",
    "Rollout",
    "RolloutEvent",
    "Run",
    "RunTally",
    "Scope",
    "Session",
    "StageFailure",
    "Task",
    "ToolCall",
    "ToolPicture",
    "WebhookAttempt",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WebhookEvent",
    "WorkerProcess",
    "blob_storage",
]
