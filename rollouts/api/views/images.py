"""Images. They belong to the installation: any key may look at them, and `operate` may register and build them."""

from __future__ import annotations

from typing import Any

from django.http import Http404
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.base import ApiView, ListView
from rollouts.api.bodies import ImageBuildRequest, NewImage
from rollouts.api.idempotency import idempotent
from rollouts.api.queries import PageQuery
from rollouts.api.schema import documented, page_of
from rollouts.api.serializers.images import ImageBuildSerializer, ImageDetailSerializer, ImageSerializer
from rollouts.models import Scope
from rollouts.selectors.images import builds_of, find_image, images, unfinished_build
from rollouts.services.errors import Conflict
from rollouts.services.images import refused_as
from sandboxes.images.services.builds import cancel_build, request_build
from sandboxes.images.services.registry import register_image
from sandboxes.models import Image


class ImageList(ListView):
    writes_need = Scope.OPERATE

    @documented("list_images", "Images that sandboxes start from, newest first", page_of(ImageSerializer), query=PageQuery)
    def get(self, request: Request) -> Response:
        return self.page(images(), lambda rows: ImageSerializer(rows, many=True).data)

    @documented(
        "register_image",
        "Register an image; nothing is built before it is asked for",
        ImageDetailSerializer,
        status=201,
        body=NewImage,
        creates=True,
    )
    @idempotent
    def post(self, request: Request) -> Response:
        body = self.body(NewImage)
        with refused_as():
            image = register_image(
                name=body.name, kind=body.kind, source=body.source, format=body.format, description=body.description
            )
        return Response(_detail(image), status=201)


class ImageDetail(ApiView):
    @documented("get_image", "An image with its source and its newest builds", ImageDetailSerializer)
    def get(self, request: Request, name: str) -> Response:
        return Response(_detail(_find(name)))


class ImageBuildNow(ApiView):
    writes_need = Scope.OPERATE

    @documented(
        "build_image", "Have it built; while a build is not finished, that one", ImageBuildSerializer, body=ImageBuildRequest
    )
    def post(self, request: Request, name: str) -> Response:
        body = self.body(ImageBuildRequest)
        return Response(ImageBuildSerializer(request_build(image=_find(name), force=body.force, by="API")).data)


class ImageBuildCancel(ApiView):
    writes_need = Scope.OPERATE

    @documented("cancel_image_build", "Cancel its build; one that runs ends within seconds", ImageBuildSerializer)
    def post(self, request: Request, name: str) -> Response:
        build = unfinished_build(_find(name))
        if build is None or not cancel_build(build=build):
            raise Conflict(f"{name} is not being built.")
        build.refresh_from_db()
        return Response(ImageBuildSerializer(build).data)


def _find(name: str) -> Image:
    image = find_image(name)
    if image is None:
        raise Http404
    return image


def _detail(image: Image) -> dict[str, Any]:
    builds = ImageBuildSerializer(builds_of(image), many=True).data
    return {**ImageSerializer(image).data, "source": image.source, "env": image.env, "builds": builds}
