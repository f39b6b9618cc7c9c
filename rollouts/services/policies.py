"""Policies under training, and the versions that trainers announce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Max, Q
from pydantic import ValidationError

from rollouts.llm.engines.sources import ExternalSource, LoraSource, PathSource, parse_source
from rollouts.models import LLMServer, Policy, PolicyVersion, Project

from .errors import Conflict, FieldError, Refused
from .registry import check_name

HIGHEST_VERSION = 2**31 - 1


def create_policy(*, project: Project, name: str) -> Policy:
    """A policy without servers. Registering a server makes one, too."""
    check_name(name, "/name")
    try:
        with transaction.atomic():
            return Policy.objects.create(project=project, name=name)
    except IntegrityError:
        raise Conflict(f"There is a policy {name} already.", [FieldError("/name", "Taken; choose another.")]) from None


def announce_version(*, policy: Policy, version: int, mode: str, source: Mapping[str, Any]) -> PolicyVersion:
    """Have the policy's servers load new weights; `weight_updates` carries it out.

    Announced again, a version is what it was; one that failed is tried again. Versions rise.
    """
    if mode not in PolicyVersion.Mode.values:
        raise Refused.field("/mode", f"Use one of {', '.join(PolicyVersion.Mode.values)}.")
    parsed = _source(source)
    with transaction.atomic():
        locked = Policy.objects.select_for_update(no_key=True).get(pk=policy.pk)
        known = PolicyVersion.objects.filter(policy=locked, version=version).first()
        if known is not None and known.state != PolicyVersion.State.FAILED:
            return _as_announced(known, mode, parsed)
        newest = newest_announced(locked)
        if not (newest < version or (known is not None and newest == version)):
            raise Refused.field("/version", f"Version {newest} has been announced; give this one a higher number.")
        if version > HIGHEST_VERSION:
            raise Refused.field("/version", f"Must be at most {HIGHEST_VERSION}.")
        _check_servers(locked, parsed)
        PolicyVersion.objects.filter(policy=locked, version=version).delete()
        return PolicyVersion.objects.create(policy=locked, version=version, mode=mode, source=parsed.model_dump())


def newest_announced(policy: Policy) -> int:
    """The highest version so far, also if no server has it yet or its announcement failed."""
    announced = PolicyVersion.objects.filter(policy=policy).aggregate(newest=Max("version"))["newest"]
    return max(policy.version, announced or 0)


def servers_to_update(policy: Policy) -> list[LLMServer]:
    """Those that take part, and those that left because an earlier update failed. What somebody paused is left alone."""
    part = Q(admission__in=[LLMServer.Admission.OPEN, LLMServer.Admission.DRAINING, LLMServer.Admission.ASLEEP])
    return list(LLMServer.objects.filter(part | Q(weights_unknown=True), policy=policy).select_related("policy").order_by("id"))


def _source(value: Mapping[str, Any]) -> PathSource | LoraSource | ExternalSource:
    try:
        return parse_source(dict(value))
    except ValidationError as error:
        # The first step of a place is the kind, where that is known.
        errors = [
            FieldError("/source" + "".join(f"/{step}" for step in item["loc"][1:]), f"{item['msg']}.")
            for item in error.errors()
        ]
        raise Refused(
            "The source of the weights is not understood; it has a `kind`: path, lora or external.", errors
        ) from error


def _as_announced(known: PolicyVersion, mode: str, source: PathSource | LoraSource | ExternalSource) -> PolicyVersion:
    if (known.mode, known.source) != (mode, source.model_dump()):
        detail = "Announced before with another mode or source; give the new weights a higher version."
        raise Conflict(f"Version {known.version} was announced before, and differently.", [FieldError("/version", detail)])
    return known


def _check_servers(policy: Policy, source: PathSource | LoraSource | ExternalSource) -> None:
    servers = servers_to_update(policy)
    if not servers:
        raise Conflict(f"Policy {policy.name} has no LLM server that takes part; register or resume one first.")
    if source.needs is None:
        return
    unable = [server.url for server in servers if source.needs.value not in server.capabilities.get("features", ())]
    if unable:
        raise Refused.field(
            "/source/kind",
            f"{', '.join(unable)} did not offer {source.needs.value} when it was probed. Start it so that it does and register "
            "it anew, or use the kind external and put the weights in place yourself.",
        )
