"""Random interleavings of everything that happens to rollouts, through the services and against the database's own rules."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import transaction
from django.db.models import F
from django.utils import timezone
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from rollouts.engine.errors import Failure
from rollouts.engine.records import MessageRecord, RunOutcome, TurnRecord
from rollouts.environments.base import RewardComponent, Score
from rollouts.lifecycle import (
    ACTIVE,
    LEASED,
    PHASES,
    STAGES,
    TERMINAL,
    Cause,
    EventKind,
    Fidelity,
    OnAgentTimeout,
    Phase,
    Stage,
    State,
    Termination,
)
from rollouts.models import Attempt, Message, Node, RescuerPass, Reward, Rollout, RolloutEvent, WorkerProcess
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.claim import Claim, claim_rollouts
from rollouts.services.dispatch import Hint, due_hints, end_waits, unmark
from rollouts.services.finish import Scored, Unscored, fail, finish_cancelled, finish_scored, finish_unscored, hand_back
from rollouts.services.lease import deregister_worker, give_back_forgotten, register_worker, renew
from rollouts.services.nodes import drain_node, resume_node
from rollouts.services.progress import Initialized, Ran, TurnWrite, hand_over_for_evaluation, hand_over_ready, record_turns
from rollouts.services.reap import reap
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db

NODES = ("here", "there")
CAUSES = (Cause.COMPLETED, Cause.MAX_TURNS, Cause.AGENT_TIMEOUT)
FAILURES = (Cause.SANDBOX_ERROR, Cause.WORKER_LOST, Cause.INVALID_TASK, Cause.EVALUATION_ERROR, Cause.STAGE_TIMEOUT)
CLOCKS = ("hinted_at", "not_before", "state_changed_at", "stuck_at", "cancel_requested_at")
LONG_AGO = timedelta(hours=2)

Act = enum.Enum("Act", "TURN END END_AND_REPEAT HAND_BACK FORGET LOOK_AT_THE_LEASE DIE STOP")
Outside = enum.Enum("Outside", "CANCEL DRAIN RESUME START_WORKERS REFUSE")


class Life(RuleBasedStateMachine):
    """Workers keep every claim they ever got, and go on using it: most of what they do comes too late."""

    hints: Bundle[Hint] = Bundle("hints")
    claims: Bundle[Claim] = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.undo = transaction.atomic()
        self.undo.__enter__()
        self.domain = Domain("life")
        self.last: dict[Any, tuple[int, str]] = {}
        self.rows: dict[Any, dict[str, Any]] = {}

    def teardown(self) -> None:
        try:
            if self.last:
                self.finish_everything()
        finally:
            transaction.set_rollback(True)
            self.undo.__exit__(None, None, None)

    # --- What happens. Few rules, each with many ways: Hypothesis then goes deep into a rollout's life ---------------------

    @initialize(n=st.integers(1, 3), on_timeout=st.sampled_from(OnAgentTimeout), retries=st.integers(0, 3))
    def begin(self, n: int, on_timeout: OnAgentTimeout, retries: int) -> None:
        run = self.domain.new_run(on_agent_timeout=on_timeout, max_infra_retries=retries)
        self.rollouts = sorted(rollout.id for rollout in self.domain.submit(n, run=run))
        self.start_workers()

    @rule(target=claims, done=st.booleans(), cause=st.sampled_from(CAUSES))
    def work(self, done: bool, cause: Cause) -> Any:
        """As it usually goes; without `done` the stage is still going on."""
        taken = self.taken()
        if done:
            for claim in taken:
                self.carry_out(claim, cause)
        return multiple(*taken)

    @rule(target=hints)
    def dispatch(self) -> Any:
        return multiple(*due_hints())

    @rule(target=claims, hint=hints, which=st.integers(0, 99), looks=st.booleans())
    def take(self, hint: Hint, which: int, looks: bool) -> Any:
        """Any worker process of the queue, also one that was lost and has not noticed; and any hint, also an old one."""
        workers = list(WorkerProcess.objects.filter(node=hint.node, stage=hint.stage.value).order_by("id"))
        worker = workers[which % len(workers)]
        if looks and not renew(worker_id=worker.id).alive:
            return multiple()
        return multiple(*claim_rollouts(stage=hint.stage, rollout_ids=hint.rollout_ids, owner=worker.id, node=worker.node))

    @rule(claim=claims, act=st.sampled_from(Act), cause=st.sampled_from(CAUSES), turn=st.integers(0, 2))
    def act(self, claim: Claim, act: Act, cause: Cause, turn: int) -> None:
        """What a worker does with a claim, current or not."""
        with self.nothing_changes_unless_current(claim):
            self.carry_out_act(claim, act, cause, turn)

    def carry_out_act(self, claim: Claim, act: Act, cause: Cause, turn: int) -> None:
        match act:
            case Act.TURN:
                record_turns([TurnWrite(claim, TurnRecord(turn, [MessageRecord(turn, turn, "assistant", "hm")]))])
            case Act.END:
                self.carry_out(claim, cause)
            case Act.END_AND_REPEAT:  # the first answer was lost
                self.carry_out(claim, cause)
                self.carry_out(claim, cause)
            case Act.HAND_BACK:
                hand_back(rollout_id=claim.rollout_id, guard=claim.guard, stage=claim.stage, reason="the worker is stopping")
            case Act.FORGET:
                give_back_forgotten(worker_id=claim.owner, stage=claim.stage, rollouts=[(claim.rollout_id, claim.attempt)])
            case Act.LOOK_AT_THE_LEASE:
                asked = renew(worker_id=claim.owner).held.get((claim.rollout_id, claim.attempt))
                if asked and asked.cancel_asked:
                    finish_cancelled(ids=[claim.rollout_id], guard=claim.guard, phase=PHASES[claim.stage], stage=claim.stage)
            case Act.DIE:
                self.expire(WorkerProcess.objects.filter(id=claim.owner))
            case Act.STOP:
                deregister_worker(worker_id=claim.owner)

    @rule(claim=claims, cause=st.sampled_from(FAILURES), retryable=st.booleans())
    def fail(self, claim: Claim, cause: Cause, retryable: bool) -> None:
        with self.nothing_changes_unless_current(claim):
            fail(claim=claim, failure=Failure(Termination(PHASES[claim.stage], cause, "broken"), retryable, "Traceback"))

    @rule(columns=st.sets(st.sampled_from(CLOCKS)), rescued=st.booleans())
    def time_passes(self, columns: set[str], rescued: bool) -> None:
        for column in columns:
            Rollout.objects.filter(**{f"{column}__isnull": False}).update(**{column: F(column) - LONG_AGO})
        end_waits()
        if rescued:
            reap()

    @rule(what=st.sampled_from(Outside), node=st.sampled_from(NODES), which=st.integers(0, 2))
    def from_outside(self, what: Outside, node: str, which: int) -> None:
        match what:
            case Outside.CANCEL:
                cancel_rollouts(project=self.domain.project, rollout_id=self.rollouts[which % len(self.rollouts)])
            case Outside.DRAIN:
                drain_node(node=Node.objects.get(name=node), seconds=60 * which)
            case Outside.RESUME:
                resume_node(node=Node.objects.get(name=node))
            case Outside.START_WORKERS:
                self.start_workers()
            case Outside.REFUSE:  # the broker took nothing
                unmark(due_hints())

    @contextmanager
    def nothing_changes_unless_current(self, claim: Claim) -> Iterator[None]:
        """A claim that was lost, or whose stage has ended, has no effect, whoever has the rollout now."""
        row = Rollout.objects.filter(id=claim.rollout_id).values()
        before, messages = row.get(), Message.objects.count()
        yield
        held_by_it = (before["state"], before["attempt"], before["lease_owner_id"])
        if held_by_it != (STAGES[claim.stage].holds_in, claim.attempt, claim.owner):
            assert row.get() == before
            assert Message.objects.count() == messages

    @rule(target=claims, done=st.integers(0, 3), act=st.sampled_from(Act), turn=st.integers(0, 2), by_another=st.booleans())
    def act_late(self, done: int, act: Act, turn: int, by_another: bool) -> Any:
        """A rollout is given up and comes to the same stage again, in the same or another process, before a claim acts."""
        for _ in range(done):
            for claim in self.taken():
                self.carry_out(claim, Cause.COMPLETED)
        old = next(iter(self.taken()), None)
        if old is None:
            return multiple()
        if by_another:
            self.expire(WorkerProcess.objects.filter(id=old.owner))
            self.start_workers()
            reap()
        else:
            hand_back(rollout_id=old.rollout_id, guard=old.guard, stage=old.stage, reason="the worker is stopping")
        for _ in Stage:
            self.time_passes({"not_before", "hinted_at"}, rescued=False)
            for claim in self.taken(prefer=old.owner):
                if (claim.rollout_id, claim.stage) == (old.rollout_id, old.stage):
                    self.act(old, act, Cause.COMPLETED, turn)
                    return multiple(old, claim)
                self.carry_out(claim, Cause.COMPLETED)
        return multiple(old)

    def start_workers(self) -> None:
        for node in NODES:
            for stage in Stage:
                register_worker(node=node, stage=stage, pid=1, concurrency=2)

    # --- What always holds -------------------------------------------------------------------------------------------------

    @invariant()
    def rules_are_kept(self) -> None:
        if not hasattr(self, "rollouts"):
            return
        rows = {row["id"]: row for row in Rollout.objects.filter(id__in=self.rollouts).values()}
        changed = [id_ for id_, row in rows.items() if row != self.rows.get(id_)]
        self.rows = rows
        for rollout in Rollout.objects.filter(id__in=changed).select_related("lease_owner") if changed else []:
            self.check_state(rollout)
            self.check_history(rollout)

    def check_state(self, rollout: Rollout) -> None:
        state = State(rollout.state)
        attempt, before = self.last.get(rollout.id, (0, State.QUEUED.value))
        assert rollout.attempt >= attempt
        assert before not in TERMINAL or (rollout.attempt, state) == (attempt, before), "an end is final"
        self.last[rollout.id] = (rollout.attempt, state.value)
        owner = rollout.lease_owner
        assert state not in LEASED or owner is not None
        if owner is not None:  # its worker, or the rescuer, moves it on
            assert STAGES[Stage(owner.stage)].holds_in is state
            assert rollout.hinted_at is None
        elif state not in TERMINAL:  # the dispatcher does, or the rescuer
            assert state in {rule.waits_in for rule in STAGES.values()}
        if state in TERMINAL:
            assert rollout.termination_cause
            assert rollout.termination_blame != "infrastructure" or (rollout.reward is None and not rollout.trainable)
            assert rollout.reward_version == len(set(Reward.objects.filter(rollout=rollout).values_list("version", flat=True)))
        else:
            assert rollout.reward is None
            assert not Reward.objects.filter(rollout=rollout).exists()

    def check_history(self, rollout: Rollout) -> None:
        moves = RolloutEvent.objects.filter(rollout=rollout).exclude(
            kind__in=[EventKind.CANCEL_REQUESTED.value, EventKind.STUCK.value]
        )
        steps = list(moves.order_by("id").values_list("from_state", "to_state"))
        assert [step[0] for step in steps[1:]] == [step[1] for step in steps[:-1]], "a history without gaps"
        assert steps[-1][1] == rollout.state
        attempts = list(Attempt.objects.filter(rollout=rollout).order_by("number").values_list("number", "ended_at"))
        assert [number for number, _ in attempts] == list(range(1, rollout.attempt + 1))
        assert all(ended is not None for _, ended in attempts[:-1])
        if attempts:
            assert (attempts[-1][1] is None) == (rollout.state in ACTIVE)

    # --- How it ends -------------------------------------------------------------------------------------------------------

    def finish_everything(self) -> None:
        """However it stands: fresh workers, a dispatcher and a rescuer bring every rollout to its end."""
        for node in Node.objects.filter(name__in=NODES):
            resume_node(node=node)
        self.expire(WorkerProcess.objects.all())
        reap()
        self.start_workers()
        for _ in range(30):
            unfinished = Rollout.objects.filter(id__in=self.rollouts, finished_at=None)
            if not unfinished.exists():
                break
            unfinished.update(state_changed_at=F("state_changed_at") - LONG_AGO)
            unfinished.filter(not_before__isnull=False).update(not_before=timezone.now() - LONG_AGO)
            unfinished.filter(hinted_at__isnull=False).update(hinted_at=F("hinted_at") - LONG_AGO)
            end_waits()
            for claim in self.taken():
                self.carry_out(claim, Cause.COMPLETED)
            reap()
        assert not Rollout.objects.filter(id__in=self.rollouts, finished_at=None).exists()
        assert not Rollout.objects.filter(id__in=self.rollouts, lease_owner__isnull=False).exists()
        for id_ in self.rollouts:
            ends = RolloutEvent.objects.filter(rollout=id_, to_state__in=[state.value for state in TERMINAL])
            assert ends.count() == 1, "it ends once"
        self.rules_are_kept()

    @staticmethod
    def taken(prefer: UUID | None = None) -> list[Claim]:
        """Everything that is due goes to live workers: of its stage the preferred one, else the youngest of its node."""
        taken = []
        for hint in due_hints():
            live = WorkerProcess.objects.filter(stage=hint.stage.value, lost_at=None, stopped_at=None)
            worker = live.filter(id=prefer).first() or live.filter(node=hint.node).latest("id")
            taken += claim_rollouts(stage=hint.stage, rollout_ids=hint.rollout_ids, owner=worker.id, node=worker.node)
        return taken

    def carry_out(self, claim: Claim, cause: Cause) -> None:
        outcome = RunOutcome(Termination(Phase.RUN, cause), {"answer": "3"}, Fidelity.TOKEN_EXACT)
        if claim.stage is Stage.INIT:
            hand_over_ready([Initialized(claim, "")])
        elif claim.stage is Stage.EVAL:
            finish_scored([Scored(claim, Score([RewardComponent("correct", 1.0)]))])
        elif cause is Cause.AGENT_TIMEOUT and claim.settings.on_agent_timeout in (OnAgentTimeout.ZERO, OnAgentTimeout.DROP):
            finish_unscored([Unscored(claim, outcome)])
        else:
            hand_over_for_evaluation([Ran(claim, outcome)])

    @staticmethod
    def expire(workers: Any) -> None:
        """The rescuer is a fair judge, and the leases of these workers have run out."""
        now = timezone.now()
        RescuerPass.objects.update(at=now, grace_until=now - LONG_AGO)
        workers.update(lease_expires_at=now - LONG_AGO)


def test_any_interleaving_keeps_the_rules_and_ends(db: None):
    profile = settings(
        max_examples=10,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    stateful.run_state_machine_as_test(Life, settings=profile)
