"""Whether rollouts can move: the dispatcher, the workers, and what binds when nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import version

from django.conf import settings
from django.db.models import Count, F, Sum
from django.utils import timezone

from rollouts.lifecycle import GATEWAY, Stage, State
from rollouts.models import Node, RescuerPass, Rollout, Run, Session, WorkerProcess
from rollouts.selectors.images import unfinished_builds
from rollouts.selectors.nodes import leftover_sandboxes
from rollouts.selectors.standstill import obstacles
from sandboxes.images.services.use import image_store
from sandboxes.images.states import ImageState
from sandboxes.models import Image

from .report import Finding, Status, fail, ok, warn

_LONGEST_PASS_SECONDS = 10.0
_MOST_RUNS = 20
_LONGEST_BUILD_WAIT = timedelta(minutes=1)


def dispatcher() -> Iterator[Finding]:
    last = RescuerPass.objects.first()
    age = (timezone.now() - last.at).total_seconds() if last else None
    if age is not None and age < _LONGEST_PASS_SECONDS:
        yield ok("dispatcher", f"got through its last pass {max(age, 0):.1f} s ago")
        return
    found = "has never run" if age is None else f"got through its last pass {timedelta(seconds=round(age))} ago"
    yield fail(
        "dispatcher", found, "Start one with `python -m django dispatch`, or look at its log. Without it nothing starts."
    )


def workers() -> Iterator[Finding]:
    live = WorkerProcess.objects.filter(stopped_at=None, lost_at=None, lease_expires_at__gt=timezone.now())
    rows = {row["stage"]: row for row in live.order_by().values("stage").annotate(number=Count("id"), slots=Sum("concurrency"))}
    for stage in Stage:
        if row := rows.get(stage.value):
            processes = "process" if row["number"] == 1 else "processes"
            yield ok("workers", f"{stage.upper()}: {row['number']} {processes} with {row['slots']} slots")
        else:
            yield fail(
                "workers",
                f"no {stage.upper()} worker is alive",
                f"Start one on a node with `python -m django work {stage.value}`, or look at its log.",
            )


def gateway() -> Iterator[Finding]:
    """Needed by agents outside any sandbox only."""
    live = WorkerProcess.objects.filter(
        stage=GATEWAY, stopped_at=None, lost_at=None, lease_expires_at__gt=timezone.now()
    ).count()
    sessions = Session.objects.filter(rollout__state=State.RUNNING.value).count()
    if live:
        yield ok(
            "gateway", f"{live} process{'es' if live > 1 else ''} with {sessions} open sessions, at {settings.GATEWAY_URL}"
        )
    elif sessions:
        yield fail("gateway", f"none runs, and {sessions} sessions are open", "Start one with `prorl gateway`.")
    else:
        yield ok("gateway", "none runs, and no session is open")


def nodes() -> Iterator[Finding]:
    """Of nodes that were there lately."""
    lately = timezone.now() - timedelta(days=1)
    silent = timezone.now() - timedelta(seconds=settings.LEASE_SECONDS)
    for node in Node.objects.filter(last_seen_at__gt=lately):
        if node.draining_since is not None:
            yield warn(
                "nodes", f"{node.name} drains since {node.draining_since:%H:%M} UTC", "Let it take part again when it may."
            )
        elif node.last_seen_at < silent:
            yield warn(
                "nodes", f"{node.name} was last seen at {node.last_seen_at:%H:%M} UTC", "Start its workers, or ignore it."
            )
        elif node.version != version("prorl-site"):
            yield warn(
                "nodes",
                f"{node.name} runs version {node.version}, this host {version('prorl-site')}",
                "Bring all hosts to one version.",
            )
        else:
            yield ok("nodes", f"{node.name} is alive")


def sandboxes() -> Iterator[Finding]:
    leftovers = list(leftover_sandboxes())
    for sandbox in leftovers:
        yield warn(
            "leftovers",
            f"{sandbox.name} on {sandbox.node} could not be stopped {sandbox.stop_attempts} times: {sandbox.stop_error}",
            "It is tried again every few minutes. End what it names, or reboot the node.",
        )
    if not leftovers:
        yield ok("leftovers", "every sandbox that was stopped is proven empty")


def images() -> Iterator[Finding]:
    """Whether images can be built, and whether those that are ready can be used on this host."""
    known, store = list(Image.objects.all()), image_store()
    builds = unfinished_builds().values()
    waiting = [build.created_at for build in builds if build.owner is None and build.not_before is None]
    if waiting and len(waiting) == len(builds) and (age := timezone.now() - min(waiting)) > _LONGEST_BUILD_WAIT:
        yield warn(
            "images",
            f"a build has waited for {timedelta(seconds=round(age.total_seconds()))}, and none runs",
            "Start a maintenance worker with `python -m django maintain`, or look at its log.",
        )
    for image in known:
        if image.digest and store.find(image.digest) is None:
            yield fail(
                "images",
                f"{image.name} is ready, and {store.folder} does not have it",
                "Point PRORL_IMAGE_DIR at the directory that all hosts share, or build it anew.",
            )
        elif image.verify_problem:
            yield warn("images", f"{image.name}: {image.verify_problem}", f"Run `prorl images build {image.name} --force`.")
        elif image.state == ImageState.FAILED.value:
            yield warn("images", f"the last build of {image.name} failed", "Its page says why. Mend its source, or remove it.")
    ready = sum(image.state == ImageState.READY.value for image in known)
    yield ok("images", f"{ready} of {len(known)} are ready, in {store.folder}" if known else "none is registered")


def stuck() -> Iterator[Finding]:
    number = Rollout.objects.filter(lease_owner__isnull=False, stuck_at__gt=F("state_changed_at")).count()
    if number:
        yield warn(
            "stuck",
            f"{number} rollouts are past their deadline though their workers are alive",
            "They are taken back within a lease. If it happens again, look at the environment's code for what blocks.",
        )
    else:
        yield ok("stuck", "no rollout is past its deadline")


def standstill() -> Iterator[Finding]:
    """When rollouts wait: the cap that binds, for each of the newest runs."""
    waiting = Run.objects.filter(rollouts__finished_at=None, rollouts__lease_owner=None, rollouts__isnull=False).distinct()
    runs = list(waiting.select_related("project", "policy").order_by("-id")[:_MOST_RUNS])
    if not runs:
        yield ok("queue", "no rollout waits")
    for run in runs:
        found = obstacles(run)
        for obstacle in found:
            status = Status.WARN if obstacle.blocks else Status.OK
            yield Finding("queue", status, f"run {run.name} of {run.project.name}: {obstacle.reason}", obstacle.remedy)
        if not found:
            yield ok("queue", f"run {run.name} of {run.project.name}: rollouts wait, and nothing keeps them from moving")
