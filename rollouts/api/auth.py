"""Who asks, for which project, and how much they may do."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from django.db.models import Q
from rest_framework.authentication import BaseAuthentication, SessionAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from rollouts.api.problems import Problem
from rollouts.models import Project, Scope
from rollouts.services import keys

_RANK = {scope: rank for rank, scope in enumerate(Scope)}


class Access(NamedTuple):
    """What a request may touch: one project, up to one scope. Found as `request.auth`."""

    project: Project
    scope: Scope
    key: str = ""  # public id of the API key

    def allows(self, scope: Scope) -> bool:
        """Scopes include the lesser ones: read < submit < admin < operate."""
        return _RANK[self.scope] >= _RANK[scope]


def access_of(request: Request) -> Access:
    """The access of a request that passed authentication."""
    access: Access = request.auth  # type: ignore[assignment]
    return access


class ApiKeyAuthentication(BaseAuthentication):
    """`Authorization: Bearer prl_…`. The key names the project."""

    def authenticate(self, request: Request) -> tuple[None, Access] | None:
        scheme, _, secret = get_authorization_header(request).decode("latin-1").partition(" ")
        if not scheme:
            return None
        if scheme.lower() != "bearer":
            raise AuthenticationFailed("Use the Bearer scheme: `Authorization: Bearer prl_…`.")
        key = keys.authenticate(secret.strip()) if secret.isascii() and "\0" not in secret else None
        if key is None:
            raise AuthenticationFailed("This key is unknown, revoked or expired.")
        return None, Access(key.project, max((Scope(scope) for scope in key.scopes), key=_RANK.__getitem__), key.public_id)

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="prorl"'


class ProjectSessionAuthentication(SessionAuthentication):
    """The dashboard's login. The project is `?project=` (name or id) or the person's only one.

    Staff get the scope admin, superusers operate.
    """

    def authenticate(self, request: Request) -> tuple[Any, Access] | None:
        authenticated = super().authenticate(request)
        if authenticated is None:
            return None
        user, _ = authenticated
        scope = Scope.OPERATE if user.is_superuser else Scope.ADMIN if user.is_staff else Scope.SUBMIT
        return user, Access(_project_of(user, request.query_params.get("project", "")), scope)

    def enforce_csrf(self, request: Request) -> None:
        try:
            super().enforce_csrf(request)
        except PermissionDenied as error:
            raise Problem("csrf_failed", str(error.detail)) from error


def _project_of(user: Any, wanted: str) -> Project:
    if "\0" in wanted:
        raise Problem("not_found", "You are not a member of such a project.")
    projects = user.projects.order_by("name")
    if wanted:
        try:
            matches = Q(id=uuid.UUID(wanted))
        except ValueError:
            matches = Q(name=wanted)
        project = projects.filter(matches).first()
        if project is None:
            raise Problem("not_found", "You are not a member of such a project.")
        return project  # type: ignore[no-any-return]
    found = list(projects[:2])
    if len(found) != 1:
        raise Problem("project_required", "Name one of your projects: `?project=<name>`.")
    return found[0]  # type: ignore[no-any-return]


class HasScope(BasePermission):
    """Reading needs `read`; everything else needs the view's `writes_need` (`submit` unless it says otherwise)."""

    def has_permission(self, request: Request, view: Any) -> bool:
        if not isinstance(request.auth, Access):
            return False
        method = str(request.method)
        if not hasattr(view, method.lower()):
            return True  # the view answers 405, which helps more than 403
        needed = Scope.READ if method in SAFE_METHODS else view.writes_need
        if not request.auth.allows(needed):
            raise Problem(
                "insufficient_scope", f"This needs the scope `{needed.value}`; yours is `{request.auth.scope.value}`."
            )
        return True
