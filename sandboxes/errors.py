"""What can go wrong at the boundary between the platform and a sandbox.

Every class says who sees it. "The engine" turns it into a termination whose blame is the infrastructure's, so that no reward is
derived from it; "the tool" hands it to the policy as the result of its tool call.
"""

from __future__ import annotations

from collections.abc import Sequence


class SandboxError(Exception):
    """Base of everything below. Catch this one to catch a failing sandbox, whatever the reason."""


class BackendUnavailable(SandboxError):
    """This host cannot run the backend at all, or not any more; the message says what to install or change.

    Seen by whoever starts a worker or runs `sandbox_selfcheck`, before any rollout is touched; later by the engine (INIT), and
    the node takes no rollouts for a while.
    """


class ImageUnavailable(SandboxError):
    """There is no image of that name to start a sandbox from, on this node and now. Seen by the engine (INIT)."""


class SandboxStartFailed(SandboxError):
    """The sandbox did not come up. Its remains are still listed by the backend until `stop`. Seen by the engine (INIT)."""


class SandboxExists(SandboxError):
    """A sandbox of that name is already there, alive or dead. Seen by the engine (INIT): two attempts claim one name."""


class SandboxLost(SandboxError):
    """The sandbox is gone, or its broker no longer serves. Seen by the engine in every stage; the rollout is repeated."""


class LimitExceeded(SandboxError):
    """The sandbox was ended because what ran inside exceeded a limit that the broker could not hold: `limit` is the field of
    `sandboxes.protocol.Limits`. Seen by the engine, which ends the rollout as the policy's doing (SANDBOX_LIMIT).
    """

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class SandboxProtocolError(SandboxError):
    """The broker sent something that is not an answer, or refused a request as malformed. Seen by the engine."""


class InputRefused(SandboxProtocolError):
    """What was typed into a program's terminal would not all reach it. Seen by the tool: the input is the policy's choice."""


class TeardownFailed(SandboxError):
    """Something of the sandbox survived `stop`; the message names it, and `processes` are the host pids among it.

    Seen by the reaper, which tries again and reports.
    """

    def __init__(self, message: str, processes: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.processes = list(processes)


class SandboxFileError(SandboxError):
    """A file request was answered with an error. Seen by the tool: the path is the policy's choice.

    `reason` is one of not_found, is_directory, not_a_directory, not_a_file, permission, too_large, no_space, other.
    """

    def __init__(self, reason: str, path: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.path = path
