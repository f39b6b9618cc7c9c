"""A rollout's life on one page: its states, the moves between them, and why it ended.

    QUEUED -> INITIALIZING -> READY -> RUNNING -> EVALUATING -> SUCCEEDED
       \\____________\\___________\\________\\___________\\________-> FAILED | TIMED_OUT | CANCELLED | DISCARDED

Crash recovery is part of the machine: from every active state a rollout can go back to QUEUED ("requeue"), where the next
claim gives it a new attempt number. Writes that carry an old attempt number change nothing.

Terminal states are final, with one exception: when EVAL failed for the infrastructure's fault and a later scoring of the stored
artefacts succeeds, the rollout is repaired (`REPAIRS`, ADR 9).

This module imports no Django. The database repeats its rules as check constraints and a trigger (see the migrations); a test
compares the two.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.StrEnum):
    """Where a rollout is. Each member says what it means when the process holding it dies."""

    QUEUED = "queued"  # waits for an INIT worker; nothing to lose
    INITIALIZING = "initializing"  # an INIT worker prepares the sandbox; lease expiry requeues
    READY = "ready"  # sandbox is warm, waits for a RUN worker of its node; requeued when the node is lost
    RUNNING = "running"  # the agent loop runs; lease expiry requeues
    EVALUATING = "evaluating"  # artefacts are stored; waits for, or is held by, an EVAL worker; only EVAL is repeated
    SUCCEEDED = "succeeded"  # ended by itself and was scored (whatever the score)
    FAILED = "failed"  # could not be carried out; the reward is null
    TIMED_OUT = "timed_out"  # a stage or the agent's budget ran out
    CANCELLED = "cancelled"  # someone asked, or a budget ran out
    DISCARDED = "discarded"  # enough siblings of its group were done


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.TIMED_OUT, State.CANCELLED, State.DISCARDED})
UNFINISHED = frozenset(State) - TERMINAL
ACTIVE = frozenset({State.INITIALIZING, State.READY, State.RUNNING, State.EVALUATING})

# States in which a worker process must hold the lease. READY never has a holder; EVALUATING has one once claimed.
LEASED = frozenset({State.INITIALIZING, State.RUNNING})

_ENDS_BADLY = {State.FAILED, State.TIMED_OUT, State.CANCELLED, State.DISCARDED}

TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.INITIALIZING} | _ENDS_BADLY),
    State.INITIALIZING: frozenset({State.READY, State.QUEUED} | _ENDS_BADLY),
    State.READY: frozenset({State.RUNNING, State.QUEUED} | _ENDS_BADLY),
    State.RUNNING: frozenset({State.EVALUATING, State.QUEUED} | _ENDS_BADLY),
    State.EVALUATING: frozenset({State.SUCCEEDED, State.QUEUED} | _ENDS_BADLY),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.TIMED_OUT: frozenset(),
    State.CANCELLED: frozenset(),
    State.DISCARDED: frozenset(),
}

# What a rollout whose EVAL failed becomes when its stored artefacts are scored after all: what RUN had made of it. Only in the
# same attempt, and only from a termination in EVAL that was the infrastructure's.
REPAIRS: dict[State, frozenset[State]] = {
    State.FAILED: frozenset({State.SUCCEEDED, State.TIMED_OUT}),
    State.TIMED_OUT: frozenset({State.SUCCEEDED}),
}


class Stage(enum.StrEnum):
    """The three worker pools. A stage claims from one waiting state and moves to (or stays in) one held state."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


# What stands in place of a stage at a gateway process: it holds the RUNNING rollouts of agents that live elsewhere. When it is
# lost they go on, in the hands of another one.
GATEWAY = "gateway"


@dataclass(frozen=True)
class StageRule:
    """What a stage claims (`waits_in`), where its rollouts are while held (`holds_in`), and where it hands them on."""

    waits_in: State
    holds_in: State
    hands_to: State


STAGES: dict[Stage, StageRule] = {
    Stage.INIT: StageRule(State.QUEUED, State.INITIALIZING, State.READY),
    Stage.RUN: StageRule(State.READY, State.RUNNING, State.EVALUATING),
    Stage.EVAL: StageRule(State.EVALUATING, State.EVALUATING, State.SUCCEEDED),
}


# Where nobody holds a rollout unless an EVAL worker has claimed it.
WAITING = tuple(rule.waits_in for rule in STAGES.values())


class Phase(enum.StrEnum):
    """Where in its life a rollout was when its termination was decided."""

    QUEUE = "queue"
    INIT = "init"
    RUN = "run"
    EVAL = "eval"


PHASES: dict[Stage, Phase] = {Stage.INIT: Phase.INIT, Stage.RUN: Phase.RUN, Stage.EVAL: Phase.EVAL}


class Blame(enum.StrEnum):
    """Who is answerable. Only `policy` terminations are trainable; `infrastructure` never carries a reward."""

    POLICY = "policy"
    INFRASTRUCTURE = "infrastructure"
    CALLER = "caller"


class Cause(enum.StrEnum):
    """Why a rollout ended."""

    COMPLETED = "completed"  # the agent gave its final answer
    MAX_TURNS = "max_turns"  # the agent used all its turns
    LENGTH = "length"  # a reply hit the per-turn token limit
    CONTEXT_OVERFLOW = "context_overflow"  # the next prompt would not fit the model's context
    REFUSAL = "refusal"  # the model (or its server's filter) refused
    MALFORMED_TOOL_CALL = "malformed_tool_call"  # repeated unparseable tool calls
    AGENT_TIMEOUT = "agent_timeout"  # the agent's own time budget ran out
    SANDBOX_LIMIT = "sandbox_limit"  # what the agent ran exceeded a limit of its sandbox
    STAGE_TIMEOUT = "stage_timeout"  # INIT or EVAL exceeded its stage budget
    ATTEMPT_TIMEOUT = "attempt_timeout"  # the whole attempt exceeded its budget
    MODEL_ERROR = "model_error"  # the model server failed
    SANDBOX_ERROR = "sandbox_error"  # the sandbox could not be started or was lost
    ENVIRONMENT_ERROR = "environment_error"  # the environment's own code raised, or INIT exceeded a limit of the sandbox
    EVALUATION_ERROR = "evaluation_error"  # scoring failed, or exceeded a limit of the sandbox
    POLICY_VERSION_GONE = "policy_version_gone"  # no server will serve the policy version it must be sampled from again
    WORKER_LOST = "worker_lost"  # the lease expired more often than max_infra_retries
    INTERNAL_ERROR = "internal_error"  # a defect of this platform
    INVALID_TASK = "invalid_task"  # the task or its environment cannot be used any more
    AGENT_LOST = "agent_lost"  # the agent of a session was silent for longer than the session's time to live
    AGENT_FAILED = "agent_failed"  # the agent of a session said that it could not go on
    CANCELLED = "cancelled"  # cancelled through the API, the CLI or a page
    SIBLINGS_DONE = "siblings_done"  # the group had enough usable rollouts
    BUDGET_EXHAUSTED = "budget_exhausted"  # a budget of its run or project ran out


_BLAME: dict[Cause, Blame] = {
    Cause.COMPLETED: Blame.POLICY,
    Cause.MAX_TURNS: Blame.POLICY,
    Cause.LENGTH: Blame.POLICY,
    Cause.CONTEXT_OVERFLOW: Blame.POLICY,
    Cause.REFUSAL: Blame.POLICY,
    Cause.MALFORMED_TOOL_CALL: Blame.POLICY,
    Cause.AGENT_TIMEOUT: Blame.POLICY,
    Cause.SANDBOX_LIMIT: Blame.POLICY,
    Cause.AGENT_LOST: Blame.CALLER,
    Cause.AGENT_FAILED: Blame.CALLER,
    Cause.CANCELLED: Blame.CALLER,
    Cause.SIBLINGS_DONE: Blame.CALLER,
    Cause.BUDGET_EXHAUSTED: Blame.CALLER,
    Cause.INVALID_TASK: Blame.CALLER,
}


@dataclass(frozen=True)
class Termination:
    """Why a rollout ended: in which phase, by which cause, and (derived) who is to blame.

    `detail` is one human sentence; tracebacks belong to the attempt's row.
    """

    phase: Phase
    cause: Cause
    detail: str = ""

    @property
    def blame(self) -> Blame:
        """Causes not listed as the policy's or the caller's are the infrastructure's."""
        return _BLAME.get(self.cause, Blame.INFRASTRUCTURE)


def final_state(termination: Termination) -> State:
    """The terminal state that a termination leads to."""
    if termination.cause in (Cause.CANCELLED, Cause.BUDGET_EXHAUSTED):
        return State.CANCELLED
    if termination.cause is Cause.SIBLINGS_DONE:
        return State.DISCARDED
    if termination.cause in (Cause.AGENT_TIMEOUT, Cause.STAGE_TIMEOUT, Cause.ATTEMPT_TIMEOUT):
        return State.TIMED_OUT
    return State.SUCCEEDED if termination.blame is Blame.POLICY else State.FAILED


class OnAgentTimeout(enum.StrEnum):
    """What happens to a rollout whose agent budget ran out (a setting of the run)."""

    SCORE = "score"  # evaluate the partial state, keep its reward
    MASK = "mask"  # evaluate and keep the reward, but mark the rollout as not trainable
    ZERO = "zero"  # do not evaluate; reward 0
    DROP = "drop"  # do not evaluate; reward null, not trainable


class Limit(enum.StrEnum):
    """What a project or a run can bound; each is a nullable column of both."""

    MAX_IN_FLIGHT = "max_in_flight"
    MAX_QUEUED = "max_queued"
    MAX_ROLLOUTS = "max_rollouts"
    MAX_TOKENS = "max_tokens"
    MAX_SANDBOX_SECONDS = "max_sandbox_seconds"
    MAX_WALL_SECONDS = "max_wall_seconds"


class OnBudget(enum.StrEnum):
    """What happens to rollouts in flight when a budget runs out (a setting of the run). Waiting ones are cancelled."""

    FINISH = "finish"  # they end as they would have
    CANCEL = "cancel"  # they are stopped


class Fidelity(enum.StrEnum):
    """The badge of a trajectory: how its tokens relate to what was sampled."""

    TOKEN_EXACT = "token-exact"  # noqa: S105 - one append-only sequence of prompt and sampled ids
    SEGMENTED = "segmented"  # exact within segments; the template was not append-only
    TEXT_ONLY = "text-only"  # the server gave no ids


class AfterFailure(enum.StrEnum):
    """What was done about a stage that failed."""

    REQUEUED = "requeued"  # a new attempt
    EVAL_AGAIN = "eval_again"  # only EVAL once more, in the same attempt
    GAVE_UP = "gave_up"  # the rollout ended


class RescoringState(enum.StrEnum):
    """Where a request to score a finished rollout again is."""

    QUEUED = "queued"
    RUNNING = "running"  # an EVAL worker has it; taken back when that worker is lost
    DONE = "done"  # there is a new reward version
    FAILED = "failed"  # nothing about the rollout has changed


class EventKind(enum.StrEnum):
    """Rows of a rollout's append-only history."""

    SUBMITTED = "submitted"
    TRANSITION = "transition"
    REQUEUED = "requeued"  # an active attempt was given up and will be repeated
    CLAIMED = "claimed"  # an EVAL worker took a waiting rollout (no state change)
    RELEASED = "released"  # an EVAL worker gave it back
    CANCEL_REQUESTED = "cancel_requested"
    STUCK = "stuck"  # far past its stage's deadline though its worker is alive; the worker is asked to give it up
    SANDBOX = "sandbox"
    RESCORED = "rescored"  # a new reward version; with a state change when it repaired the rollout
