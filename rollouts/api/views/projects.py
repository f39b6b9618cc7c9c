"""The project that the key belongs to."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView
from rollouts.api.schema import documented
from rollouts.api.serializers.limits import ProjectSerializer


class ProjectDetail(ApiView):
    @documented("get_project", "The project of the key, with its limits and what it has used", ProjectSerializer)
    def get(self, request: Request) -> Response:
        return Response(ProjectSerializer(self.project).data)
