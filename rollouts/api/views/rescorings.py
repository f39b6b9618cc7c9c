"""Scoring finished rollouts again."""

from __future__ import annotations

from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, ListView, find
from rollouts.api.bodies import Rescore, RescoreRun
from rollouts.api.queries import PageQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.history import RequestedSerializer, RescoringSerializer
from rollouts.selectors.history import rescorings_of
from rollouts.selectors.rollouts import rollouts_of, runs_of
from rollouts.services.rescore import rescore_rollout, rescore_run

_PAGE = page_of(RescoringSerializer)


class RolloutRescore(ApiView):
    @documented("rescore_rollout", "Score a finished rollout again", RescoringSerializer, status=202, body=Rescore)
    def post(self, request: Request, id: UUID) -> Response:
        rollout = find(rollouts_of(self.project), id)
        body = self.body(Rescore)
        rescoring = rescore_rollout(project=self.project, rollout_id=rollout.id, environment_id=body.environment)
        return Response(RescoringSerializer(rescoring).data, status=202)


class RunRescore(ApiView):
    @documented("rescore_run", "Score a run's finished rollouts again", RequestedSerializer, status=202, body=RescoreRun)
    def post(self, request: Request, id: UUID) -> Response:
        run = find(runs_of(self.project), id)
        body = self.body(RescoreRun)
        asked = rescore_run(project=self.project, run_id=run.id, environment_id=body.environment, only_cause=body.only_cause)
        return Response(asked._asdict(), status=202)


class RolloutRescorings(ListView):
    @documented("list_rollout_rescorings", "A rollout's rescorings, newest first", _PAGE, query=PageQuery)
    def get(self, request: Request, id: UUID) -> Response:
        rollout = find(rollouts_of(self.project), id)
        return self.page(rescorings_of(rollout), lambda rows: RescoringSerializer(rows, many=True).data)


class RunRescorings(ListView):
    @documented("list_run_rescorings", "A run's rescorings, newest first", _PAGE, query=PageQuery)
    def get(self, request: Request, id: UUID) -> Response:
        run = find(runs_of(self.project), id)
        return self.page(rescorings_of(run), lambda rows: RescoringSerializer(rows, many=True).data)
