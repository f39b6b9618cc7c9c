"""One rollout: a page for each aspect, all under the same header."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from rollouts.lifecycle import TERMINAL
from rollouts.models import Rollout
from rollouts.selectors import timeline
from rollouts.selectors.dashboard import rollouts_of
from rollouts.selectors.history import attempts_of, rescorings_of
from rollouts.services.cancel import cancel_rollouts
from rollouts.services.errors import Refused
from rollouts.services.rescore import rescore_rollout, why_not
from rollouts.web.access import visible_or_404, visible_projects
from rollouts.web.branches import branches_of
from rollouts.web.conditional import clock, etag_of, fragment, unchanged
from rollouts.web.document import rollout_document
from rollouts.web.tokens import turn_tokens

TABS = ("timeline", "reward", "tokens", "events", "attempts", "raw")


def _rollout(request: HttpRequest, rollout_id: UUID) -> Rollout:
    queryset = rollouts_of(visible_projects(request)).defer(None).select_related("group", "session")
    return visible_or_404(request, queryset, pk=rollout_id)


def _header(rollout: Rollout, turns: list[timeline.Turn] | None = None) -> dict[str, Any]:
    siblings = list(
        Rollout.objects.filter(group=rollout.group_id).only("id", "index", "state", "reward", "group_id").order_by("index")
    )
    place = next(i for i, sibling in enumerate(siblings) if sibling.pk == rollout.pk)
    return {
        "rollout": rollout,
        "siblings": siblings,
        "previous": siblings[place - 1] if place else None,
        "next": siblings[place + 1] if place + 1 < len(siblings) else None,
        "terminal": rollout.state in TERMINAL,
        "seconds": timeline.seconds(rollout, turns) if turns is not None else None,
    }


def _page(request: HttpRequest, rollout: Rollout, tab: str, **content: Any) -> HttpResponse:
    context = {
        **_header(rollout, content.get("turns")),
        "tab": tab,
        "tabs": TABS,
        "projects": visible_projects(request),
        "chosen": rollout.project,
        "section": "rollouts",
        **content,
    }
    return render(request, f"web/rollout/{tab}.html", context)


def _etag(rollout: Rollout) -> str:
    running = None if rollout.state in TERMINAL else clock()
    return etag_of(rollout.pk, rollout.state, rollout.attempt, rollout.turns, rollout.state_changed_at, running)


def _branches(request: HttpRequest, turns: list[timeline.Turn], *, after: int = -1) -> dict[str, Any]:
    """The branches of the trajectory, the one that `?branch=` names, and its turns (else all) that come after `after`."""
    branches = branches_of(turn.call for turn in turns if turn.call)
    branch = branches.chosen(request.GET.get("branch", ""))
    places = ((turn, branches.places.get(turn.number)) for turn in turns if turn.number > after)
    shown = [(turn, place) for turn, place in places if branch is None or place is None or place.branch is branch]
    return {"branches": branches, "branch": branch, "shown": shown}


@require_safe
@login_required
def detail(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """The timeline: messages, model calls, tool calls; `?branch=` narrows it to one conversation."""
    rollout = _rollout(request, rollout_id)
    turns = timeline.turns(rollout)
    last = turns[-1].number if turns else -1
    return _page(request, rollout, "timeline", turns=turns, last=last, etag=_etag(rollout), **_branches(request, turns))


@require_safe
@login_required
def live(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """What a running rollout added since turn `?after=` of `?attempt=`, and its header; 304 when nothing changed."""
    rollout = _rollout(request, rollout_id)
    etag = _etag(rollout)
    try:
        after, attempt = int(request.GET["after"]), int(request.GET["attempt"])
    except (KeyError, ValueError):
        raise Http404("after and attempt are turn and attempt numbers") from None
    if attempt != rollout.attempt:
        return HttpResponse(headers={"HX-Refresh": "true"})
    if answer := unchanged(request, etag):
        return answer
    turns = timeline.turns(rollout)
    context = {
        **_header(rollout, turns),
        **_branches(request, turns, after=after),
        "last": turns[-1].number if turns else after,
        "tab": "timeline",
        "tabs": TABS,
    }
    return fragment(request, "web/rollout/live.html", context, etag)


@require_safe
@login_required
def reward(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """Components of the reward, by version."""
    rollout = _rollout(request, rollout_id)
    return _page(
        request,
        rollout,
        "reward",
        versions=timeline.reward_versions(rollout),
        rescorings=list(rescorings_of(rollout).order_by("-id")),
        why_not=why_not(rollout),
    )


@require_POST
@login_required
def rescore(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """Queue the rollout to be scored again."""
    rollout = _rollout(request, rollout_id)
    try:
        rescore_rollout(project=rollout.project, rollout_id=rollout.pk)
    except Refused as refused:
        messages.error(request, refused.detail)
    else:
        messages.success(request, "The rollout will be scored again.")
    return redirect("rollout-reward", rollout_id=rollout.pk)


@require_safe
@login_required
def tokens(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """Token counts of the turns (`?segment=`: of one segment), and ids and logprobs of the one that `?turn=` names."""
    rollout = _rollout(request, rollout_id)
    calls = list(timeline.calls_of(rollout, rollout.attempt))
    branches = branches_of(calls)
    segment = next((one for one in branches.segments if str(one.number) == request.GET.get("segment")), None)
    if segment is not None:
        calls = [call for call in calls if call.segment == segment.number]
    numbers = [call.turn for call in calls]
    wanted = request.GET.get("turn", "")
    number = int(wanted) if wanted.isdecimal() and int(wanted) in numbers else next(iter(numbers), None)
    chosen = turn_tokens(rollout, number) if number is not None else None
    return _page(request, rollout, "tokens", calls=calls, chosen_turn=chosen, branches=branches, segment=segment)


@require_safe
@login_required
def events(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """The append-only history."""
    rollout = _rollout(request, rollout_id)
    return _page(request, rollout, "events", events=list(rollout.events.order_by("id")))


@require_safe
@login_required
def attempts(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """Every execution with its error."""
    rollout = _rollout(request, rollout_id)
    return _page(request, rollout, "attempts", history=list(reversed(attempts_of(rollout))))


@require_safe
@login_required
def raw(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """The rollout as JSON, without token arrays."""
    rollout = _rollout(request, rollout_id)
    return _page(request, rollout, "raw", document=rollout_document(rollout, tokens=False))


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def cancel(request: HttpRequest, rollout_id: UUID) -> HttpResponse:
    """Ask, then cancel."""
    rollout = _rollout(request, rollout_id)
    if request.method == "POST":
        if cancel_rollouts(project=rollout.project, rollout_id=rollout.pk):
            messages.success(request, "Cancelling the rollout.")
        else:
            messages.info(request, "The rollout had already ended.")
        return redirect("rollout", rollout_id=rollout.pk)
    context = {
        "title": f"Cancel rollout {str(rollout.pk)[-8:]}?",
        "unfinished": int(rollout.state not in TERMINAL),
        "back": "rollout",
        "back_id": rollout.pk,
        "projects": visible_projects(request),
        "chosen": rollout.project,
        "section": "rollouts",
    }
    return render(request, "web/confirm_cancel.html", context)
