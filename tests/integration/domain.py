"""A small world for tests of services: one project with an arithmetic environment, a policy with a live server, a run."""

from __future__ import annotations

import uuid
from typing import ClassVar

from django.utils import timezone

from rollouts.lifecycle import ACTIVE, STAGES, TERMINAL, Stage, State
from rollouts.models import Dataset, Environment, Group, LLMServer, Policy, Project, Rollout, Run, Task, WorkerProcess
from rollouts.run_settings import RunSettings
from rollouts.services.claim import Claim, claim_rollouts
from rollouts.services.lease import register_worker
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.services.transition import Guard, move

_WAY = [State.QUEUED, State.INITIALIZING, State.READY, State.RUNNING, State.EVALUATING]


class Domain:
    """Builds rows through the services wherever a service exists."""

    NOBODY: ClassVar[uuid.UUID] = uuid.UUID(int=0)

    def __init__(self, name: str = "alpha") -> None:
        self.project = Project.objects.create(name=name)
        self.environment = Environment.objects.create(project=self.project, name="sums", handler="arithmetic")
        self.dataset = Dataset.objects.create(project=self.project, environment=self.environment, name="sums")
        self.task = Task.objects.create(dataset=self.dataset, key="one", payload={"a": 1, "b": 2})
        self.policy = Policy.objects.create(project=self.project, name="tiny")
        self.server = LLMServer.objects.create(
            project=self.project,
            policy=self.policy,
            url=f"http://llm.test/{name}",
            model="tiny",
            max_model_len=4096,
            capacity=8,
        )
        self.run = self.new_run()

    def new_run(self, **settings: object) -> Run:
        complete = RunSettings.model_validate(settings).model_dump(mode="json")
        return Run.objects.create(project=self.project, name="run", policy=self.policy, settings=complete)

    def submit(self, n: int = 1, run: Run | None = None) -> list[Rollout]:
        groups: list[Group] = submit_groups(run=run or self.run, groups=[GroupRequest(n=n, task_id=self.task.id)])
        return list(Rollout.objects.filter(group=groups[0]).order_by("index"))

    def worker(self, stage: Stage = Stage.RUN, concurrency: int = 8, node: str = "test-node") -> WorkerProcess:
        worker_id = register_worker(node=node, stage=stage, pid=1, concurrency=concurrency)
        return WorkerProcess.objects.get(id=worker_id)

    def hint(self, *rollouts: Rollout) -> None:
        """As the dispatcher marks them, whatever there is room for."""
        Rollout.objects.filter(id__in=[r.id for r in rollouts], lease_owner=None).update(hinted_at=timezone.now())

    def claim(self, rollout: Rollout, stage: Stage, worker: WorkerProcess | None = None) -> Claim:
        worker = worker or self.worker(stage)
        self.hint(rollout)
        [claimed] = claim_rollouts(stage=stage, rollout_ids=[rollout.id], owner=worker.id, node=worker.node)
        return claimed

    def rollout_in(self, state: State) -> Rollout:
        """A rollout that was moved to `state` on the usual way (held where that state is held)."""
        rollout = self.submit()[0]
        target = State.EVALUATING if state in TERMINAL else state
        for stage, rule in STAGES.items():
            if _WAY.index(target) >= _WAY.index(rule.holds_in) and target is not State.QUEUED:
                worker = self.worker(stage)
                self.hint(rollout)
                assert claim_rollouts(stage=stage, rollout_ids=[rollout.id], owner=worker.id, node=worker.node)
                if _WAY.index(target) > _WAY.index(rule.holds_in):
                    move([rollout.id], to=rule.hands_to, guard=Guard(list(ACTIVE)))
        if state in TERMINAL:
            move([rollout.id], to=state, guard=Guard([State.EVALUATING]), values={"termination_cause": "completed"})
        rollout.refresh_from_db()
        return rollout
