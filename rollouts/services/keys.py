"""API keys: issued once, stored hashed."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db.models import Q
from django.utils import timezone

from rollouts.models import ApiKey, Project, Scope

from .errors import Refused

_PREFIX = "prl"
# How stale `last_used_at` may be: busy keys are not written on every request.
_LAST_USED_RESOLUTION = timedelta(minutes=1)


class IssuedKey(NamedTuple):
    """A new key and its secret, which cannot be read again."""

    key: ApiKey
    secret: str


def issue_key(*, project: Project, name: str, scopes: Sequence[str], expires_at: datetime | None = None) -> IssuedKey:
    """Make a key. The secret is 32 random bytes, so one fast hash protects it."""
    if not scopes or set(scopes) - set(Scope.values):
        raise Refused.field("/scopes", f"Choose at least one of {', '.join(Scope.values)}.")
    if expires_at is not None and expires_at <= timezone.now():
        raise Refused.field("/expires_at", "Lies in the past.")
    public_id, token = secrets.token_hex(4), secrets.token_urlsafe(32)
    key = ApiKey.objects.create(
        project=project,
        name=name,
        public_id=public_id,
        secret_sha256=digest(token),
        scopes=sorted(scopes),
        expires_at=expires_at,
    )
    return IssuedKey(key, f"{_PREFIX}_{public_id}_{token}")


def authenticate(secret: str) -> ApiKey | None:
    """The valid key that a secret belongs to, or None."""
    prefix, _, rest = secret.partition("_")
    public_id, _, token = rest.partition("_")
    if prefix != _PREFIX or not token:
        return None
    now = timezone.now()
    key = (
        ApiKey.objects.select_related("project")
        .filter(Q(expires_at=None) | Q(expires_at__gt=now), public_id=public_id, revoked_at=None)
        .first()
    )
    if key is None or not hmac.compare_digest(key.secret_sha256, digest(token)):
        return None
    if key.last_used_at is None or now - key.last_used_at > _LAST_USED_RESOLUTION:
        ApiKey.objects.filter(id=key.id).update(last_used_at=now)
    return key


def revoke_key(*, key: ApiKey) -> None:
    """The key stops working at once. Revoking again is harmless."""
    ApiKey.objects.filter(id=key.id, revoked_at=None).update(revoked_at=timezone.now())


def digest(token: str) -> str:
    """What is stored of a secret of 32 random bytes."""
    return hashlib.sha256(token.encode()).hexdigest()
