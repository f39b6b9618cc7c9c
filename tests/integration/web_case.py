"""A world worth looking at: two projects, three environments, a finished run, a run that is going on, and an empty one."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.utils import timezone

from rollouts.lifecycle import ACTIVE, TERMINAL, Cause, EventKind, Fidelity, Phase, Stage, State, Termination
from rollouts.models import (
    Attempt,
    Dataset,
    Environment,
    Group,
    LLMServer,
    Message,
    MessagePicture,
    ModelCall,
    Policy,
    Project,
    Reward,
    Rollout,
    RolloutEvent,
    Run,
    Task,
    ToolCall,
    WorkerProcess,
)
from rollouts.run_settings import RunSettings
from rollouts.services import blobs
from sandboxes.protocol import Picture
from tests.integration.web_texts import ARITHMETIC_TURNS, SWE_PROMPT, SWE_TURNS, TRACEBACK, TurnText

SYSTEM = "You are a helpful assistant that can interact with a computer shell to solve programming tasks."


class Ended(NamedTuple):
    """How a rollout of the factory ended; `reward` None for those that were not scored."""

    cause: Cause
    phase: Phase = Phase.RUN
    state: State = State.SUCCEEDED
    reward: float | None = None
    detail: str = ""


SOLVED = Ended(Cause.COMPLETED, reward=1.0)
UNSOLVED = Ended(Cause.COMPLETED, reward=0.0)
PARTLY = Ended(Cause.COMPLETED, reward=0.5)
MOSTLY = Ended(Cause.COMPLETED, reward=0.75)
OUT_OF_TURNS = Ended(Cause.MAX_TURNS, reward=0.0, detail="no final answer within 10 turns")
OUT_OF_TIME = Ended(Cause.AGENT_TIMEOUT, state=State.TIMED_OUT, reward=0.25, detail="the agent's budget of 600 s ran out")
NODE_LOST = Ended(Cause.WORKER_LOST, state=State.FAILED, detail="the lease expired 6 times; the last worker was run@gpu-07")
SANDBOX_LOST = Ended(Cause.SANDBOX_ERROR, Phase.INIT, State.FAILED, detail="bubblewrap ended before the broker answered")
CANCELLED = Ended(Cause.CANCELLED, Phase.QUEUE, State.CANCELLED, detail="cancelled through the API")


class WebWorld:
    """Builds rows directly, in the shapes that the services leave behind."""

    def __init__(self) -> None:
        self._clock = timezone.now() - dt.timedelta(hours=3)
        self._xids = itertools.count(1000)
        self.project = Project.objects.create(name="code-rl")
        self.other_project = Project.objects.create(name="math-lab")
        self.owner = User.objects.create_user("maria", password="correct horse")
        self.stranger = User.objects.create_user("sam", password="correct horse")
        self.project.members.add(self.owner)
        self.other_project.members.add(self.stranger)
        self.policy = Policy.objects.create(project=self.project, name="qwen3-8b", version=14)
        self.server = LLMServer.objects.create(
            project=self.project,
            policy=self.policy,
            policy_version=14,
            url="http://gpu-03.cluster:8000",
            model="Qwen/Qwen3-8B",
            max_model_len=32768,
            last_probe_at=timezone.now(),
        )
        self.swe = self._environment("swe-bash", "arithmetic")
        self.sums = self._environment("arithmetic", "arithmetic", version=3)
        self.math = self._environment("competition-math", "math")

    def _environment(self, name: str, handler: str, version: int = 1) -> Environment:
        environment = Environment.objects.create(project=self.project, name=name, handler=handler, version=version)
        Dataset.objects.create(project=self.project, environment=environment, name=f"{name}-train")
        return environment

    def task(self, environment: Environment, key: str) -> Task:
        return Task.objects.create(dataset=environment.datasets.get(), key=key, payload={"question": key})

    def new_run(self, name: str, **settings: Any) -> Run:
        complete = RunSettings.model_validate(settings).model_dump(mode="json")
        return Run.objects.create(
            project=self.project, name=name, policy=self.policy, settings=complete, created_at=self._clock
        )

    def workers(self, *stages: Stage) -> list[WorkerProcess]:
        """Live worker processes of some stages."""
        expires = timezone.now() + dt.timedelta(minutes=5)
        return [
            WorkerProcess.objects.create(
                node="gpu-03", stage=stage.value, pid=4100 + i, concurrency=32, lease_expires_at=expires
            )
            for i, stage in enumerate(stages)
        ]

    def group(self, run: Run, task: Task, fates: Sequence[Ended | State]) -> list[Rollout]:
        """A group whose rollouts ended in these ways, or are in these states."""
        group = Group.objects.create(run=run, task=task, n=len(fates), created_at=self._clock)
        self._clock += dt.timedelta(minutes=2)
        return [self._rollout(group, index, fate) for index, fate in enumerate(fates)]

    def _rollout(self, group: Group, index: int, fate: Ended | State) -> Rollout:
        state = fate.state if isinstance(fate, Ended) else fate
        started = state is not State.QUEUED and fate is not CANCELLED
        rollout = Rollout(
            project=self.project,
            run=group.run,
            group=group,
            task=group.task,
            environment=group.task.dataset.environment,
            index=index,
            state=state.value,
            attempt=1 if started else 0,
            created_at=group.created_at,
            state_changed_at=group.created_at + dt.timedelta(seconds=95),
        )
        if started:
            rollout.node = ("gpu-03", "gpu-04", "gpu-07")[index % 3]
            rollout.sandbox_name = f"prorl-{rollout.pk}-1"
            rollout.llm_server = self.server
            rollout.queue_seconds, rollout.init_seconds = 0.8 + index * 0.7, 0.04 + index * 0.03
        if state in (State.INITIALIZING, State.RUNNING):
            rollout.lease_owner = self.workers(Stage.INIT if state is State.INITIALIZING else Stage.RUN)[0]
        if isinstance(fate, Ended):
            self._end(rollout, fate)
        rollout.save()
        if started:
            self._history(rollout)
        if state in (State.RUNNING, State.EVALUATING) or (started and isinstance(fate, Ended) and fate.phase is not Phase.INIT):
            self._trajectory(rollout)
        if rollout.reward is not None:
            self._score(rollout)
        return rollout

    def _end(self, rollout: Rollout, fate: Ended) -> None:
        termination = Termination(fate.phase, fate.cause, fate.detail)
        rollout.termination_phase = termination.phase.value
        rollout.termination_cause = termination.cause.value
        rollout.termination_blame = termination.blame.value
        rollout.termination_detail = termination.detail
        rollout.finished_at = rollout.state_changed_at
        rollout.finished_xid = next(self._xids)
        rollout.reward = fate.reward
        rollout.trainable = fate.reward is not None
        if fate.cause is Cause.WORKER_LOST:
            rollout.infra_retries = 6
        if rollout.reward is not None:
            rollout.run_seconds, rollout.eval_seconds = 91.7 + rollout.index * 9.3, 2.4 + rollout.index * 0.4
            rollout.fidelity = Fidelity.TOKEN_EXACT.value
            rollout.artefacts = {"final_answer": "joblib is now listed in the dependencies that show_versions prints."}

    def _history(self, rollout: Rollout) -> None:
        ended = rollout.state in TERMINAL
        failed = rollout.termination_blame == "infrastructure"
        Attempt.objects.create(
            rollout=rollout,
            number=1,
            node=rollout.node,
            started_at=rollout.created_at,
            ended_at=rollout.finished_at,
            stage="run" if ended else "",
            outcome=rollout.state if ended else "",
            error=rollout.termination_detail if failed else "",
            traceback=TRACEBACK if failed else "",
        )
        way = [State.QUEUED, State.INITIALIZING, State.READY, State.RUNNING, State.EVALUATING]
        way = way[: way.index(State(rollout.state)) + 1] if rollout.state in ACTIVE else [*way, State(rollout.state)]
        events = []
        kinds = [EventKind.SUBMITTED] + [EventKind.TRANSITION] * (len(way) - 1)
        for i, (kind, state) in enumerate(zip(kinds, way, strict=True)):
            event = RolloutEvent(
                rollout=rollout,
                attempt=min(i, 1),
                at=rollout.created_at + dt.timedelta(seconds=i * i * 3.37),
                kind=kind.value,
                from_state=way[i - 1].value if i else "",
                to_state=state.value,
                data={"node": rollout.node} if i else {},
            )
            events.append(event)
        RolloutEvent.objects.bulk_create(events)

    def _trajectory(self, rollout: Rollout) -> None:
        if rollout.environment == self.swe:
            self.add_turns(rollout, SWE_TURNS if rollout.state in TERMINAL else SWE_TURNS[:3], SWE_PROMPT)
        else:
            self.add_turns(rollout, ARITHMETIC_TURNS, f"Solve: {rollout.task.key}. Put the final answer inside \\boxed{{}}.")

    def add_turns(self, rollout: Rollout, texts: Sequence[TurnText], prompt: str = "") -> None:
        """Append turns to the rollout's newest attempt; the first turn opens with the system message and `prompt`."""
        attempt = rollout.attempt
        first = rollout.turns
        index = Message.objects.filter(rollout=rollout, attempt=attempt).count()
        context = rollout.prompt_tokens + rollout.sampled_tokens
        messages: list[Message] = []
        calls: list[ModelCall] = []
        tool_calls: list[ToolCall] = []
        for number, text in enumerate(texts, start=first):
            opening = [("system", "", SYSTEM), ("user", "", prompt)] if number == 0 else []
            answers = [("tool", tool.name, tool.answer) for tool in text.tools]
            for role, name, content in [*opening, ("assistant", "", text.reply), *answers]:
                place = {"index": index + len(messages), "turn": number}
                messages.append(Message(rollout=rollout, attempt=attempt, role=role, name=name, content=content, **place))
            sampled, new = _ids(text.reply), _ids("\n".join(content for _, _, content in opening) or "tool output " * 9)
            call = ModelCall(
                rollout=rollout,
                attempt=attempt,
                turn=number,
                context_ids=new,
                sampled_ids=sampled,
                logprobs=[-(abs(math.sin(i * 1.7 + number)) ** 9) * 5 for i in range(len(sampled))],
                text=text.reply,
                finish_reason="stop",
                prompt_tokens=context + len(new),
                policy=self.policy.name,
                policy_version=self.policy.version,
                server_id=self.server.pk,
                latency=1.4 + number * 0.61,
            )
            calls.append(call)
            context += len(new) + len(sampled)
            rollout.prompt_tokens += len(new)
            rollout.sampled_tokens += len(sampled)
            for order, tool in enumerate(text.tools):
                tool_call = ToolCall(
                    rollout=rollout,
                    attempt=attempt,
                    turn=number,
                    index=order,
                    name=tool.name,
                    arguments=tool.arguments,
                    raw=tool.raw,
                    output=tool.output,
                    exit_code=tool.exit_code,
                    timed_out=tool.timed_out,
                    truncated_bytes=tool.truncated_bytes,
                    error=tool.error,
                    started_at=rollout.created_at + dt.timedelta(seconds=number * 5),
                    duration=tool.duration,
                )
                tool_calls.append(tool_call)
        Message.objects.bulk_create(messages)
        ModelCall.objects.bulk_create(calls)
        ToolCall.objects.bulk_create(tool_calls)
        rollout.turns = first + len(texts)
        rollout.policy_version = self.policy.version
        Rollout.objects.filter(pk=rollout.pk).update(
            turns=rollout.turns,
            prompt_tokens=rollout.prompt_tokens,
            sampled_tokens=rollout.sampled_tokens,
            policy_version=rollout.policy_version,
        )

    def show(self, rollout: Rollout, message: int, *pictures: Picture) -> None:
        """Put pictures into a message of the rollout's newest attempt."""
        place = {"rollout": rollout, "attempt": rollout.attempt, "message": message}
        for index, picture in enumerate(pictures):
            MessagePicture.objects.create(**place, index=index, mime=picture.mime, blob_id=blobs.put(picture.data))

    def finish(self, rollout: Rollout, fate: Ended) -> None:
        """End a rollout that was waiting or running."""
        rollout.state = fate.state.value
        rollout.lease_owner = None
        rollout.state_changed_at = timezone.now()
        self._end(rollout, fate)
        rollout.save()

    def _score(self, rollout: Rollout) -> None:
        assert rollout.reward is not None
        tests = {"passed": round(rollout.reward * 8), "total": 8, "log": "tests/test_show_versions.py::test_joblib PASSED"}
        Reward.objects.create(rollout=rollout, name="tests", value=rollout.reward, weight=1.0, detail=tests)
        Reward.objects.create(rollout=rollout, name="format", value=1.0, weight=0.0, detail={"boxed": True})

    def fill(self) -> None:
        """The finished run, the running one and the empty one."""
        self.finished = self.new_run("grpo-swe-step-0140", sampling={"max_tokens": 2048})
        keys = ["scikit-learn__sklearn-12461", "sympy__sympy-20916", "django__django-15213", "pallets__flask-4045"]
        fates: Iterator[list[Ended]] = iter(
            [
                [SOLVED, UNSOLVED, SOLVED, MOSTLY, OUT_OF_TURNS, NODE_LOST, SOLVED, PARTLY],
                [UNSOLVED, UNSOLVED, OUT_OF_TURNS, UNSOLVED, UNSOLVED, OUT_OF_TURNS, UNSOLVED, UNSOLVED],
                [SOLVED] * 8,
                [SOLVED, OUT_OF_TIME, SANDBOX_LOST, PARTLY, SOLVED, UNSOLVED, SOLVED, CANCELLED],
            ]
        )
        self.groups = [self.group(self.finished, self.task(self.swe, key), next(fates)) for key in keys]
        self.groups.append(self.group(self.finished, self.task(self.sums, "17 * 23 + 4"), [SOLVED, SOLVED, UNSOLVED, SOLVED]))
        self.running = self.new_run("grpo-swe-step-0141", sampling={"max_tokens": 2048})
        held = [State.EVALUATING, State.RUNNING, State.RUNNING, State.READY, State.INITIALIZING, State.QUEUED]
        self.live_group = self.group(self.running, self.task(self.swe, "astropy__astropy-14182"), [SOLVED, UNSOLVED, *held])
        self.group(self.running, self.task(self.math, "aime-2024-ii-7"), [State.QUEUED] * 8)
        self.empty = self.new_run("eval-baseline")


def _ids(text: str) -> list[int]:
    """Plausible token ids: one for about four characters."""
    return [(ord(text[i]) * 977 + i * 31) % 151_000 for i in range(0, len(text), 4)]
