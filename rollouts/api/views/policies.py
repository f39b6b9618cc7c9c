"""Policies and their versions: what trainers announce, and what became of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from django.http import Http404
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, ListView
from rollouts.api.bodies import NewPolicy, NewPolicyVersion, WeightsInPlace
from rollouts.api.idempotency import idempotent
from rollouts.api.queries import PageQuery, PolicyVersionQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.policies import PolicyDetailSerializer, PolicySerializer, PolicyVersionSerializer
from rollouts.api.streaming import in_thread, later
from rollouts.api.watch import Watch
from rollouts.models import Policy, PolicyVersion, Project, Scope
from rollouts.selectors import policies as selectors
from rollouts.selectors.registry import policies_of, servers_of
from rollouts.services import policies
from rollouts.services.weight_updates import note_weights_in_place

_SETTLED = frozenset({PolicyVersion.State.READY, PolicyVersion.State.LIVE, PolicyVersion.State.FAILED})
_STATES: Watch[str] = Watch(selectors.version_states, seconds=0.25)


class PolicyList(ListView):
    writes_need = Scope.ADMIN

    @documented("list_policies", "Policies, newest first", page_of(PolicySerializer), query=PageQuery)
    def get(self, request: Request) -> Response:
        return self.page(policies_of(self.project), lambda rows: PolicySerializer(rows, many=True).data)

    @documented(
        "create_policy", "Make a policy that has no servers yet", PolicySerializer, status=201, body=NewPolicy, creates=True
    )
    @idempotent
    def post(self, request: Request) -> Response:
        policy = policies.create_policy(project=self.project, name=self.body(NewPolicy).name)
        return Response(PolicySerializer(policy).data, status=201)


class PolicyDetail(ApiView):
    @documented("get_policy", "A policy with its LLM servers and its newest announcement", PolicyDetailSerializer)
    def get(self, request: Request, name: str) -> Response:
        policy = _policy(self.project, name)
        servers = servers_of(self.project).filter(policy=policy).order_by("id")
        newest = selectors.versions_of(policy).first()
        return Response(PolicyDetailSerializer(policy, context={"servers": servers, "announcement": newest}).data)


class PolicyVersionList(ListView):
    @documented(
        "list_policy_versions",
        "Announced versions of a policy, newest first",
        page_of(PolicyVersionSerializer),
        query=PageQuery,
    )
    def get(self, request: Request, name: str) -> Response:
        versions = selectors.versions_of(_policy(self.project, name))
        return self.page(versions, lambda rows: PolicyVersionSerializer(rows, many=True).data)

    @documented(
        "announce_policy_version",
        "Have all servers of a policy load new weights; the same version announced again is only answered",
        PolicyVersionSerializer,
        status=202,
        body=NewPolicyVersion,
    )
    def post(self, request: Request, name: str) -> Response:
        body = self.body(NewPolicyVersion)
        announced = policies.announce_version(
            policy=_policy(self.project, name), version=body.version, mode=body.mode, source=body.source
        )
        return Response(PolicyVersionSerializer(announced).data, status=202)


class PolicyVersionDetail(ApiView):
    query_model = PolicyVersionQuery

    @documented(
        "get_policy_version",
        "An announcement, and what became of it on each server",
        PolicyVersionSerializer,
        query=PolicyVersionQuery,
    )
    def get(self, request: Request, name: str, version: int) -> HttpResponseBase:
        found = _version(self.project, name, version)
        if found.state in _SETTLED or not self.query.wait:
            return Response(PolicyVersionSerializer(found).data)
        return later(self._answer_later(found), str(request.accepted_renderer.media_type))

    async def _answer_later(self, version: PolicyVersion) -> AsyncIterator[str | bytes]:
        await _STATES.news(version.pk, lambda state: state in _SETTLED, timeout=self.query.wait)
        yield await in_thread(self._rendered, version)

    def _rendered(self, version: PolicyVersion) -> str | bytes:
        version.refresh_from_db()
        rendered: str | bytes = self.request.accepted_renderer.render(PolicyVersionSerializer(version).data)
        return rendered


class PolicyVersionLoaded(ApiView):
    @documented(
        "report_weights_in_place",
        "Say that the weights of an external update are in place: its servers take calls again",
        PolicyVersionSerializer,
        body=WeightsInPlace,
    )
    def post(self, request: Request, name: str, version: int) -> Response:
        failed = self.body(WeightsInPlace).failed
        found = note_weights_in_place(announcement=_version(self.project, name, version), failed=failed)
        return Response(PolicyVersionSerializer(found).data)


def _policy(project: Project, name: str) -> Policy:
    policy = policies_of(project).filter(name=name).first()
    if policy is None:
        raise Http404
    return policy


def _version(project: Project, name: str, version: int) -> PolicyVersion:
    found: Any = selectors.versions_of(_policy(project, name)).filter(version=version).first()
    if found is None:
        raise Http404
    announcement: PolicyVersion = found
    return announcement
