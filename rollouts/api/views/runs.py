"""Runs and groups."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, ListView, find
from rollouts.api.bodies import NewGroups, NewRun, RunChange
from rollouts.api.idempotency import idempotent
from rollouts.api.queries import PageQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.runs import (
    CancelledSerializer,
    GroupSerializer,
    RunDetailSerializer,
    RunSerializer,
    SubmittedGroupSerializer,
    SubmittedGroupsSerializer,
)
from rollouts.models import Group
from rollouts.selectors import rollouts as selectors
from rollouts.services import submit
from rollouts.services.budgets import change_limits
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.retention import set_run_keep


class RunList(ListView):
    @documented("list_runs", "Runs, newest first", page_of(RunSerializer), query=PageQuery)
    def get(self, request: Request) -> Response:
        return self.page(selectors.runs_of(self.project), lambda rows: RunSerializer(rows, many=True).data)

    @documented("create_run", "Open a run", RunSerializer, status=201, body=NewRun, creates=True)
    @idempotent
    def post(self, request: Request) -> Response:
        body = self.body(NewRun)
        settings = body.settings.model_dump(mode="json", exclude_unset=True)
        run = submit.create_run(
            project=self.project,
            name=body.name,
            policy=body.policy,
            priority=body.priority,
            settings=settings,
            limits=body.limits.model_dump(),
        )
        return Response(RunSerializer(run).data, status=201)


class RunDetail(ApiView):
    @documented("get_run", "A run with its progress", RunDetailSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        run = find(selectors.runs_of(self.project), id)
        return Response(RunDetailSerializer(run, context={"counts": selectors.run_counts(run)}).data)

    @documented("change_run", "Change limits of a run, or whether it is kept", RunSerializer, body=RunChange)
    def patch(self, request: Request, id: UUID) -> Response:
        run = find(selectors.runs_of(self.project), id)
        change = self.body(RunChange)
        if limits := change.limits.model_dump(exclude_unset=True):
            change_limits(owner=run, limits=limits)
        if change.keep is not None:
            set_run_keep(run=run, keep=change.keep)
        return Response(RunSerializer(run).data)


class RunCancel(ApiView):
    @documented("cancel_run", "Cancel a run and all its rollouts", CancelledSerializer)
    def post(self, request: Request, id: UUID) -> Response:
        run = find(selectors.runs_of(self.project), id)
        return Response({"cancelled": cancel_rollouts(project=self.project, run_id=run.id)})


class GroupList(ListView):
    query_model = PageQuery
    oldest_first = True

    @documented("list_groups", "Groups of a run, oldest first", page_of(GroupSerializer), query=PageQuery)
    def get(self, request: Request, id: UUID) -> Response:
        run = find(selectors.runs_of(self.project), id)
        return self.page(selectors.groups_of(self.project).filter(run=run), _represent)

    @documented(
        "submit_groups",
        "Queue rollouts, all groups or none",
        SubmittedGroupsSerializer,
        status=201,
        body=NewGroups,
        creates=True,
    )
    @idempotent
    def post(self, request: Request, id: UUID) -> Response:
        run = find(selectors.runs_of(self.project), id)
        body = self.body(NewGroups)
        requests = [submit.GroupRequest(**group.model_dump()) for group in body.groups]
        groups = submit.submit_groups(run=run, groups=requests)
        return Response({"groups": SubmittedGroupSerializer(groups, many=True).data}, status=201)


class GroupDetail(ApiView):
    @documented("get_group", "A group", GroupSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        [group] = _represent([find(selectors.groups_of(self.project), id)])
        return Response(group)


class GroupCancel(ApiView):
    @documented("cancel_group", "Cancel a group's rollouts", CancelledSerializer)
    def post(self, request: Request, id: UUID) -> Response:
        group = find(selectors.groups_of(self.project), id)
        return Response({"cancelled": cancel_rollouts(project=self.project, group_id=group.id)})


def _represent(groups: list[Group]) -> Any:
    return GroupSerializer(groups, many=True, context={"counts": selectors.group_counts(groups)}).data
