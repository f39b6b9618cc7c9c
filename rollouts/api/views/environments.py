"""Environments."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, ListView, find
from rollouts.api.bodies import NewEnvironment
from rollouts.api.idempotency import idempotent
from rollouts.api.queries import PageQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.registry import EnvironmentDetailSerializer, EnvironmentSerializer
from rollouts.models import Environment, Scope
from rollouts.selectors import registry as selectors
from rollouts.services import registry


class EnvironmentList(ListView):
    writes_need = Scope.ADMIN

    @documented("list_environments", "Registered environments, newest first", page_of(EnvironmentSerializer), query=PageQuery)
    def get(self, request: Request) -> Response:
        environments = selectors.environments_of(self.project)
        return self.page(environments, lambda rows: EnvironmentSerializer(rows, many=True).data)

    @documented(
        "create_environment",
        "Register an environment, or the next version of one",
        EnvironmentDetailSerializer,
        status=201,
        body=NewEnvironment,
        creates=True,
    )
    @idempotent
    def post(self, request: Request) -> Response:
        body = self.body(NewEnvironment)
        environment = registry.create_environment(
            project=self.project, name=body.name, handler=body.handler, config=body.config, description=body.description
        )
        return Response(_detail(environment), status=201)


class EnvironmentDetail(ApiView):
    @documented("get_environment", "An environment with the schemas of its config and tasks", EnvironmentDetailSerializer)
    def get(self, request: Request, id: UUID) -> Response:
        return Response(_detail(find(selectors.environments_of(self.project), id)))


def _detail(environment: Environment) -> dict[str, Any]:
    schemas = selectors.handler_schemas(environment)
    return {**EnvironmentSerializer(environment).data, "config_schema": schemas.config, "task_schema": schemas.task}
