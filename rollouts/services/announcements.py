"""What becomes of an announced version, as guarded steps in the database: begun, loaded or failed on each server, ended.

`weight_updates` calls these between the moments in which it talks to servers. Each may be repeated.
"""

from __future__ import annotations

import json
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.db.models.functions import Coalesce, Greatest, Now

from rollouts.lifecycle import Cause, Phase, Stage, State, Termination
from rollouts.llm.engines.sources import LoraSource, parse_source
from rollouts.llm.types import ServerAddress
from rollouts.models import LLMServer, Policy, PolicyVersion, Rollout
from rollouts.run_settings import Versions

from .assign import address_of
from .finish import hand_back
from .holds import release_servers
from .policies import servers_to_update
from .session_closing import give_up_session
from .transition import Guard

UNFINISHED = (PolicyVersion.State.ANNOUNCED, PolicyVersion.State.LOADING, PolicyVersion.State.READY)
_PINNED = [Versions.GROUP.value, Versions.STRICT.value]


class Target(NamedTuple):
    """A server that an announcement is for. `is_done`: it has the version already, from before a crash of the executor."""

    id: UUID
    address: ServerAddress
    is_asleep: bool
    is_done: bool


class Begun(NamedTuple):
    """An announcement that is carried out now, and for how many seconds yet."""

    announcement: PolicyVersion
    targets: list[Target]
    seconds_left: float


def next_of(policy_id: UUID) -> UUID | None:
    """What is to be carried out for a policy: its oldest announcement, unless that waits for the trainer."""
    oldest = PolicyVersion.objects.filter(policy_id=policy_id, state__in=UNFINISHED).order_by("version").first()
    return None if oldest is None or oldest.state == PolicyVersion.State.READY else oldest.pk


def begin(announcement_id: UUID) -> Begun:
    """Take an announcement in hand, or again after a crash."""
    with transaction.atomic():
        announcement = PolicyVersion.objects.select_related("policy").select_for_update(of=("self",)).get(pk=announcement_id)
        servers = servers_to_update(announcement.policy)
        announcement.report |= {str(s.id): {"state": "waiting"} for s in servers if str(s.id) not in announcement.report}
        announcement.state = PolicyVersion.State.LOADING
        announcement.save(update_fields=["report", "state"])
        PolicyVersion.objects.filter(pk=announcement.pk).update(begun_at=Coalesce("begun_at", Now()))
    targets = [
        Target(
            s.id,
            address_of(s),
            is_asleep=s.admission == LLMServer.Admission.ASLEEP,
            is_done=s.policy_version == announcement.version and not s.weights_unknown,
        )
        for s in servers
    ]
    return Begun(announcement, targets, _seconds_left(announcement.pk))


def _seconds_left(announcement_id: UUID) -> float:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT %s - EXTRACT(EPOCH FROM now() - begun_at)::float FROM rollouts_policyversion WHERE id = %s",
            [settings.WEIGHT_UPDATE_SECONDS, announcement_id],
        )
        return float(cursor.fetchone()[0])


def note(announcement_id: UUID, server_id: UUID, state: str, *, error: str = "", seconds: float | None = None) -> None:
    """What is known of one server: waiting, loading, ready, live or failed."""
    entry = {"state": state, "error": error[:500], "seconds": None if seconds is None else round(seconds, 3)}
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE rollouts_policyversion SET report = report || jsonb_build_object(%s::text, %s::jsonb) WHERE id = %s",
            [str(server_id), json.dumps(entry), announcement_id],
        )


def note_loaded(announcement: PolicyVersion, server_id: UUID, *, seconds: float) -> None:
    """A server has the new weights, and samples nothing yet. What must not be sampled from them is taken back."""
    source = parse_source(announcement.source)
    with transaction.atomic():
        server = LLMServer.objects.select_for_update(no_key=True).filter(pk=server_id).first()
        if server is None:
            return note(announcement.pk, server_id, "failed", error="It was removed meanwhile.")
        server.policy_version = announcement.version
        if server.weights_unknown:
            server.weights_unknown, server.admission, server.last_error = False, LLMServer.Admission.OPEN, ""
        if isinstance(source, LoraSource):
            server.model = source.name
        server.save(update_fields=["policy_version", "weights_unknown", "admission", "last_error", "model"])
        Policy.objects.filter(pk=announcement.policy_id).update(version=Greatest("version", announcement.version))
        _take_back_overtaken(server_id, announcement.version)
        note(announcement.pk, server_id, "live", seconds=seconds)


def _take_back_overtaken(server_id: UUID, version: int) -> None:
    """Rollouts on a server that may be sampled from one version, which is not the new one: begun anew, and no retry is counted.

    Whoever carries them out finds the attempt superseded, so that nothing it may still sample is stored.
    """
    pinned = Q(run__settings__versions__in=_PINNED) | Q(required_version__isnull=False)
    running = Rollout.objects.filter(pinned, state=State.RUNNING.value, llm_server_id=server_id)
    others = running.filter(Q(required_version=None) | ~Q(required_version=version)).select_related("run", "session")
    for rollout in others.defer("artefacts").order_by("id"):
        reason = f"its LLM server has loaded version {version}, and it began on an older one"
        if hasattr(rollout, "session"):
            give_up_session(rollout, Termination(Phase.RUN, Cause.POLICY_VERSION_GONE, reason))
        else:
            hand_back(rollout_id=rollout.id, guard=Guard([State.RUNNING], rollout.attempt), stage=Stage.RUN, reason=reason)


def note_failed(announcement: PolicyVersion, server_id: UUID, error: str, *, seconds: float | None = None) -> None:
    """A server did not load the weights. Which ones it has is not known, so it takes no calls until a later version loads."""
    with transaction.atomic():
        LLMServer.objects.filter(pk=server_id).update(
            admission=LLMServer.Admission.PAUSED,
            weights_unknown=True,
            last_error=f"version {announcement.version} was not loaded: {error}"[:300],
        )
        note(announcement.pk, server_id, "failed", error=error, seconds=seconds)


def note_ready(announcement_id: UUID) -> None:
    """The servers of an external update are free; the trainer's turn."""
    PolicyVersion.objects.filter(pk=announcement_id, state=PolicyVersion.State.LOADING).update(state=PolicyVersion.State.READY)


def finish(announcement_id: UUID) -> None:
    """Let calls begin again. The version is live if any server has it."""
    with transaction.atomic():
        announcement = PolicyVersion.objects.select_for_update().get(pk=announcement_id)
        live = any(entry["state"] == "live" for entry in announcement.report.values())
        announcement.state = PolicyVersion.State.LIVE if live else PolicyVersion.State.FAILED
        announcement.save(update_fields=["state"])
        PolicyVersion.objects.filter(pk=announcement_id).update(finished_at=Now())
        release_servers([UUID(server_id) for server_id in announcement.report])


def release_abandoned_holds() -> None:
    """A hold belongs to an announcement under way; whatever became of the one that set it, calls may begin again."""
    under_way = PolicyVersion.objects.filter(state__in=UNFINISHED).values("policy_id")
    held = LLMServer.objects.exclude(hold=LLMServer.Hold.NONE).exclude(policy_id__in=under_way)
    release_servers(list(held.values_list("id", flat=True)))


def give_up_silent_trainers() -> None:
    """Servers that were ready for a trainer that never said it was done: nobody knows which weights they have."""
    error = f"the trainer did not say within {settings.WEIGHT_UPDATE_SECONDS:g} s that the weights are in place"
    ready = PolicyVersion.objects.filter(state=PolicyVersion.State.READY)
    for announcement_id in ready.values_list("pk", flat=True):
        if _seconds_left(announcement_id) > 0:
            continue
        with transaction.atomic():
            # The trainer may say it just now.
            announcement = ready.select_for_update().filter(pk=announcement_id).first()
            if announcement is not None:
                for server_id in sorted(announcement.report):
                    note_failed(announcement, UUID(server_id), error)
                finish(announcement_id)
