"""Rollouts and what happened inside them."""

from __future__ import annotations

from uuid import UUID

from django.http import Http404, HttpResponse
from django.utils.http import parse_etags, quote_etag
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, ListView, find
from rollouts.api.binary import DataRenderer, PictureRenderer
from rollouts.api.queries import PageQuery, RolloutQuery, TrajectoryQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.history import AttemptHistorySerializer, AttemptsSerializer
from rollouts.api.serializers.runs import (
    CancelledSerializer,
    RewardSerializer,
    RewardsSerializer,
    RolloutDetailSerializer,
    RolloutEventSerializer,
    RolloutSerializer,
)
from rollouts.api.serializers.trajectory import TrajectorySerializer, trajectory_json
from rollouts.llm.pictures import type_of
from rollouts.selectors.history import attempts_of
from rollouts.selectors.rollouts import events_of, listed_rollouts, rewards_of, rollouts_of
from rollouts.selectors.storage import picture_of, seen_picture
from rollouts.selectors.trajectory import trajectories
from rollouts.services.cancel import cancel_rollouts


class RolloutList(ListView):
    query_model = RolloutQuery

    @documented("list_rollouts", "Rollouts, newest first", page_of(RolloutSerializer), query=RolloutQuery)
    def get(self, request: Request) -> Response:
        branches = self.query.wanted().branches([self.project])
        return self.page(listed_rollouts(), lambda rows: RolloutSerializer(rows, many=True).data, branches)


class RolloutDetail(ApiView):
    @documented("get_rollout", "A rollout with its attempts and artefacts", RolloutDetailSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        rollout = find(rollouts_of(self.project).defer(None).select_related("artefacts_blob").prefetch_related("attempts"), id)
        return Response(RolloutDetailSerializer(rollout).data)


class RolloutCancel(ApiView):
    @documented("cancel_rollout", "Cancel a rollout", CancelledSerializer)
    def post(self, request: Request, id: UUID) -> Response:
        rollout = find(rollouts_of(self.project), id)
        return Response({"cancelled": cancel_rollouts(project=self.project, rollout_id=rollout.id)})


class RolloutTrajectory(ApiView):
    query_model = TrajectoryQuery

    @documented("get_trajectory", "What a rollout's newest attempt saw and did", TrajectorySerializer, query=TrajectoryQuery)
    def get(self, request: Request, id: UUID) -> Response:
        rollout = find(rollouts_of(self.project), id)
        trajectory = trajectories([rollout])[rollout.id]
        return Response(trajectory_json(trajectory, full_prompts=self.query.tokens == "full"))


class RolloutPicture(ApiView):
    renderer_classes = [DataRenderer, JSONRenderer]

    @documented("get_picture", "The data of a picture that a tool call displayed", bytes, status=(200, DataRenderer.media_type))
    def get(self, request: Request, id: UUID, turn: int, call: int, index: int) -> HttpResponse:
        picture = picture_of(find(rollouts_of(self.project), id), turn, call, index)
        if picture is None:
            raise Http404
        headers = {"X-Content-Type-Options": "nosniff"}
        return HttpResponse(picture.blob.content(), content_type=DataRenderer.media_type, headers=headers)


class SeenPicture(ApiView):
    renderer_classes = [PictureRenderer, JSONRenderer]

    @documented(
        "get_seen_picture", "The data of a picture that the model was shown", bytes, status=(200, PictureRenderer.media_type)
    )
    def get(self, request: Request, id: UUID, sha256: str) -> HttpResponse:
        picture = seen_picture(find(rollouts_of(self.project), id), sha256)
        if picture is None:
            raise Http404
        etag = quote_etag(picture.blob_id)
        # It never changes, but whoever has it asks again: the right to see it may end.
        headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
        if etag in parse_etags(request.headers.get("If-None-Match", "")):
            return HttpResponse(status=304, headers=headers)
        data = picture.blob.content()
        headers |= {"X-Content-Type-Options": "nosniff", "Content-Disposition": f'attachment; filename="{picture.blob_id}"'}
        return HttpResponse(data, content_type=type_of(data) or DataRenderer.media_type, headers=headers)


class RolloutEvents(ListView):
    oldest_first = True

    @documented("list_events", "A rollout's history, oldest first", page_of(RolloutEventSerializer), query=PageQuery)
    def get(self, request: Request, id: UUID) -> Response:
        rollout = find(rollouts_of(self.project), id)
        return self.page(events_of(rollout), lambda rows: RolloutEventSerializer(rows, many=True).data)


class RolloutRewards(ApiView):
    @documented("get_rewards", "A rollout's reward and all versions of its components", RewardsSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        rollout = find(rollouts_of(self.project), id)
        components = RewardSerializer(rewards_of(rollout), many=True).data
        return Response({"reward": rollout.reward, "components": components})


class RolloutAttempts(ApiView):
    @documented("get_attempts", "A rollout's attempts, with every failure of their stages", AttemptsSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        history = attempts_of(find(rollouts_of(self.project), id))
        context = {"failures": {attempt.number: failures for attempt, failures, _ in history}}
        attempts = AttemptHistorySerializer([attempt for attempt, *_ in history], many=True, context=context).data
        return Response({"attempts": attempts})
