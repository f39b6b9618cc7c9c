"""Sessions: rollouts whose agents run outside any sandbox and call the gateway."""

from __future__ import annotations

from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.auth import access_of
from rollouts.api.base import ApiView, ListView, find
from rollouts.api.bodies import NewSession, SessionEnd, SessionReward
from rollouts.api.idempotency import idempotent
from rollouts.api.queries import PageQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.sessions import OpenedSessionSerializer, SessionSerializer
from rollouts.environments.base import RewardComponent
from rollouts.models import Rollout
from rollouts.selectors.sessions import sessions_of
from rollouts.services import session_closing, sessions
from rollouts.services.errors import Refused


class SessionList(ListView):
    @documented("list_sessions", "Sessions, newest first", page_of(SessionSerializer), query=PageQuery)
    def get(self, request: Request) -> Response:
        return self.page(sessions_of(self.project), lambda rows: SessionSerializer(rows, many=True).data)

    @documented(
        "open_session",
        "Begin a rollout whose agent calls the gateway from elsewhere",
        OpenedSessionSerializer,
        status=201,
        body=NewSession,
        creates=True,
    )
    def post(self, request: Request) -> Response:
        self._key = ""
        answer = self._open(request)
        rollout = find(sessions_of(self.project), UUID(str(answer.data["id"])))
        # The key is nowhere to be read, so whoever repeats the request because an answer was lost gets another one.
        key = self._key or sessions.new_key(session=rollout.session)
        opened = OpenedSessionSerializer(rollout, context={"key": key}).data
        return Response(opened, status=answer.status_code, headers=answer.headers)

    @idempotent
    def _open(self, request: Request) -> Response:
        """The answer that is kept for repeated requests: without the key."""
        body = self.body(NewSession)
        session, self._key = sessions.open_session(
            project=self.project,
            opened_by=_opener(request),
            run=body.run,
            policy=body.policy,
            task=sessions.TaskChoice(**body.task.model_dump()) if body.task else None,
            ttl_seconds=body.ttl_seconds,
            metadata=body.metadata,
        )
        return Response({"id": str(session.pk)}, status=201)


class _OfSession(ApiView):
    """A view of one session."""

    def rollout(self, id_: UUID) -> Rollout:
        return find(sessions_of(self.project), id_)

    def answer(self, id_: UUID) -> Response:
        return Response(SessionSerializer(self.rollout(id_)).data)


class SessionDetail(_OfSession):
    @documented("get_session", "A session", SessionSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        return self.answer(id)

    @documented("cancel_session", "Cancel a session; its calls are refused from then on", None, status=204)
    def delete(self, request: Request, id: UUID) -> Response:
        sessions.cancel_session(session=self.rollout(id).session)
        return Response(status=204)


class SessionHeartbeat(_OfSession):
    @documented("send_heartbeat", "Say that the agent is still there, though it calls no model", SessionSerializer)
    def post(self, request: Request, id: UUID) -> Response:
        sessions.heartbeat(session=self.rollout(id).session)
        return self.answer(id)


class SessionRewardView(_OfSession):
    @documented("give_reward", "Say what a session is worth, before it is closed", SessionSerializer, body=SessionReward)
    def post(self, request: Request, id: UUID) -> Response:
        session = self.rollout(id).session
        session_closing.give_reward(session=session, components=_components(self.body(SessionReward), ""))
        return self.answer(id)


class SessionClose(_OfSession):
    @documented("close_session", "End a session, with a reward or what is to be scored", SessionSerializer, body=SessionEnd)
    def post(self, request: Request, id: UUID) -> Response:
        session = self.rollout(id).session
        body = self.body(SessionEnd)
        session_closing.close_session(
            session=session,
            outcome=body.outcome,
            components=_components(body.reward, "/reward") if body.reward else None,
            artefacts=body.artefacts,
            detail=body.detail,
        )
        return self.answer(id)


def _components(reward: SessionReward, pointer: str) -> list[RewardComponent]:
    if (reward.value is None) == (reward.components is None):
        raise Refused.field(f"{pointer}/value", "Give either `value` or `components`.")
    if reward.value is not None:
        return [RewardComponent(session_closing.REWARD, reward.value)]
    return [RewardComponent(**component.model_dump()) for component in reward.components or ()]


def _opener(request: Request) -> str:
    """As people know it: the public id of the API key, or the person who is logged in."""
    key = access_of(request).key
    return f"API key {key}" if key else str(request.user)
