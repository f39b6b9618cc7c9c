"""How the dashboard writes numbers, times and states. Missing values are an en dash, never a zero."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
from typing import Any

from django import template
from django.utils import timezone

from rollouts.models import LLMServer, ModelCall, PolicyVersion, Reward, Rollout, RolloutEvent, Task
from rollouts.selectors.dashboard import Tally
from rollouts.selectors.run_summary import Solved, StageSeconds
from rollouts.selectors.server_rows import Figure
from rollouts.selectors.timeline import Turn
from rollouts.web import pictures, text, versions
from rollouts.web.abilities import Abilities, abilities_of
from rollouts.web.calls import shown_call

register = template.Library()
MISSING = "–"
PREVIEW = 90


@register.filter
def words(value: object) -> str:
    """`max_turns` as `max turns`."""
    return text.plain(str(value)).replace("_", " ") if value else MISSING


@register.filter
def short_id(value: object) -> str:
    """The end of a UUID: version 7 ids of one moment share their beginning."""
    return str(value)[-8:]


@register.filter
def task_name(task: Task) -> str:
    """Its key. A task that was stored with its submission has only an id."""
    return f"task {short_id(task.pk)}" if task.key == str(task.pk) else task.key


@register.filter
def reward(value: float | None) -> str:
    """Up to three decimals, no trailing zeros."""
    if value is None or not math.isfinite(value):
        return MISSING
    shown = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if shown == "-0" else shown.replace("-", "−")


@register.filter
def grade(value: float | None) -> str:
    """The CSS class of a reward's colour; the number always stands beside it."""
    if value is None:
        return "grade-none"
    return f"grade-{min(max(round(value * 4), 0), 4)}"


@register.filter
def duration(value: float | dt.timedelta | None) -> str:
    """Seconds as 340 ms, 12.3 s, 4 m 10 s, 2 h 05 m or 3 d 4 h."""
    if value is None:
        return MISSING
    seconds = value.total_seconds() if isinstance(value, dt.timedelta) else float(value)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m" if hours < 48 else f"{hours // 24} d {hours % 24} h"


@register.filter
def spent(value: float) -> str:
    """Seconds of a stage; one that has not been measured yet is missing, not 0."""
    return duration(value) if value else MISSING


@register.filter
def ago(moment: dt.datetime | None) -> str:
    """The age of a moment, in its largest unit."""
    if moment is None:
        return MISSING
    seconds = max((timezone.now() - moment).total_seconds(), 0)
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@register.filter
def thousands(value: float | None) -> str:
    """12,345 with thin spaces."""
    return MISSING if value is None else f"{value:,.0f}".replace(",", "\u202f")


@register.filter
def compact(value: float | None) -> str:
    """950, 12.3k, 4.5M."""
    if value is None:
        return MISSING
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if value >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}"


@register.filter
def pretty_json(value: Any) -> str:
    """Indented JSON, keys in their stored order."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


@register.filter
def plain(value: str) -> str:
    """Text of a model or program without terminal escapes."""
    return text.plain(value)


@register.filter
def fold(value: str) -> text.Folded:
    """Text in head, middle and tail."""
    return text.fold(value)


@register.filter
def command(arguments: dict[str, Any]) -> str:
    """What a tool call ran, see `shown_call`."""
    return shown_call(arguments)


@register.filter
def passages(turn: Turn) -> list[text.Passage]:
    """A turn's reply, reasoning apart; tool calls as sampled are left to their own panels."""
    return text.passages(turn.reply, tuple(step.call.raw for step in turn.tools))


@register.filter
def first_line(value: str) -> str:
    """The beginning of a text, as a preview."""
    line = value.partition("\n")[0]
    return line if len(line) <= PREVIEW else line[:PREVIEW].rsplit(" ", 1)[0] + " …"


@register.filter
def detail_value(value: Any) -> str:
    """A JSON value as a person would write it."""
    return text.plain(value) if isinstance(value, str) else pretty_json(value)


@register.filter
def artefact_texts(artefacts: dict[str, Any]) -> list[tuple[str, str]]:
    """Artefacts as texts with their names; of files in one, each by itself."""
    texts = []
    for name, value in artefacts.items():
        if isinstance(value, dict) and value and all(isinstance(part, str) for part in value.values()):
            texts += [(f"{words(name)}: {text.plain(key)}", part) for key, part in value.items()]
        else:
            texts.append((words(name), detail_value(value)))
    return texts


@register.filter
def patch_parts(value: str) -> list[tuple[str, str]]:
    """A patch as (added, removed, place or nothing, lines in a row of that kind)."""
    lines = text.plain(value).splitlines(keepends=True)
    return [(kind, "".join(same)) for kind, same in itertools.groupby(lines, key=_patch_kind)]


def _patch_kind(line: str) -> str:
    if line.startswith(("+++", "---", "diff ", "index ")):
        return ""
    return {"+": "added", "-": "removed", "@": "place"}.get(line[:1], "")


@register.filter
def tiny_reward(value: float) -> str:
    """A reward in at most three characters: 1, 0, .5, .33, -1."""
    digits = f"{abs(value):.2f}".rstrip("0").rstrip(".")
    short = digits if digits == "0" else digits.removeprefix("0")
    return f"−{short}" if value < 0 and digits != "0" else short


@register.filter
def part(component: Reward) -> float | None:
    """What a component adds to the reward."""
    return None if component.value is None else component.value * component.weight


@register.filter
def total_seconds(rollout: Rollout) -> float:
    """Queue and stages of the newest attempt together."""
    return rollout.queue_seconds + rollout.init_seconds + rollout.run_seconds + rollout.eval_seconds


@register.filter
def tokens_per_second(call: ModelCall) -> float | None:
    """Sampled tokens of an annotated model call by its latency."""
    return call.sampled_tokens / call.latency if call.latency else None  # type: ignore[attr-defined]


@register.filter
def call_range(call: ModelCall) -> str:
    """The versions that sampled a reply."""
    return versions.call_range(call)


@register.filter
def call_change(call: ModelCall) -> str:
    """How the weights changed during a reply."""
    return versions.call_change(call)


@register.filter
def rollout_range(rollout: Rollout) -> str:
    """The versions that sampled a rollout."""
    return versions.rollout_range(rollout)


@register.filter
def behind(rollout: Rollout) -> int | None:
    """The rollout's staleness, were it consumed now."""
    return versions.staleness(rollout, rollout.run.policy)


@register.filter
def figure_value(value: float | None, figure: Figure) -> str:
    """What a server tells of itself: a share as percent, other numbers in short."""
    if value is None:
        return MISSING
    return f"{100 * value:.0f} %" if figure.is_share else compact(value)


@register.filter
def abilities(server: LLMServer) -> Abilities:
    """What a server offers and what it does not, in words."""
    return abilities_of(server)


@register.filter
def weights_source(source: dict[str, Any]) -> str:
    """Where servers get new weights from: its kind and what there is to say of it."""
    kind = str(source.get("kind", ""))
    rest = [str(value) if name == kind else f"{name} {value}" for name, value in source.items() if name != "kind"]
    return text.plain(" ".join([kind, ", ".join(rest)])).strip() or MISSING


@register.filter
def took(version: PolicyVersion) -> dt.timedelta | None:
    """From the moment when it was its turn to its end."""
    return version.finished_at - (version.begun_at or version.announced_at) if version.finished_at else None


@register.filter
def fidelity_meaning(value: str) -> str:
    """What a trajectory's badge says."""
    return {
        "token-exact": "One sequence of ids, as they were sent and sampled. Nothing was decoded and encoded again.",
        "segmented": "Several sequences, each exactly as it was sent and sampled. A trainer gets every one of them by itself.",
        "text-only": "The server gave no token ids. What a trainer would tokenise need not be what was sampled.",
    }.get(value, "")


@register.filter
def with_gaps(events: list[RolloutEvent]) -> list[tuple[RolloutEvent, float | None]]:
    """Events with the seconds since the one before."""
    gaps = [None, *((after.at - before.at).total_seconds() for before, after in itertools.pairwise(events))]
    return list(zip(events, gaps, strict=False))


@register.filter
def stage_name(value: str) -> str:
    """What the seconds of a stage mean."""
    return {"queue": "waiting for workers", "init": "init", "run": "run", "eval": "eval"}.get(value, value)


@register.filter
def json_string(value: str) -> str:
    """A JSON string literal, for htmx attributes that take JSON."""
    return json.dumps(value)


@register.inclusion_tag("web/parts/state.html")
def state(value: str) -> dict[str, str]:
    """A rollout's state by icon and word."""
    return {"state": value}


@register.inclusion_tag("web/rollout/picture.html")
def picture(shown: pictures.AnyPicture) -> dict[str, Any]:
    """A picture as a thumbnail that opens whole, or as a file to save."""
    return {"picture": shown, "address": pictures.address_of(shown), "name": pictures.name_of(shown)}


@register.inclusion_tag("web/parts/bar.html")
def tally_bar(tally: Tally) -> dict[str, Any]:
    """How far a run is."""
    ends = [("b-succeeded", tally.succeeded), ("b-failed", tally.failed + tally.timed_out), ("b-stopped", tally.stopped)]
    return _bar([*ends, ("b-active", tally.active), ("b-queued", tally.queued)])


@register.inclusion_tag("web/parts/bar.html")
def solved_bar(solved: Solved) -> dict[str, Any]:
    """Groups by how many of their rollouts solved the task."""
    return _bar([("b-none", solved.none), ("b-some", solved.some), ("b-all", solved.all)])


@register.inclusion_tag("web/parts/bar.html")
def share_bar(n: float, total: float, blame: str) -> dict[str, Any]:
    """One part of a whole."""
    return _bar([(f"b-{blame}", n), ("b-rest", max(total - n, 0))])


@register.inclusion_tag("web/parts/bar.html")
def stage_bar(stage: StageSeconds, stages: list[StageSeconds]) -> dict[str, Any]:
    """A stage's p50 and p95, against the slowest stage's p95."""
    slowest = max(other.p95 for other in stages)
    return _bar([(f"t-{stage.stage}", stage.p50), ("b-tail", stage.p95 - stage.p50), ("b-rest", slowest - stage.p95)])


@register.inclusion_tag("web/parts/bar.html")
def time_bar(rollout: Rollout) -> dict[str, Any]:
    """Where a rollout's time went."""
    names = ("queue", "init", "run", "eval")
    return _bar([(f"t-{name}", getattr(rollout, f"{name}_seconds")) for name in names])


def _bar(parts: list[tuple[str, float]]) -> dict[str, Any]:
    """A stacked bar of (CSS class, amount) parts, 100 units wide. It is decoration: the numbers stand beside it."""
    total = sum(amount for _, amount in parts)
    pieces, left = [], 0.0
    for name, amount in parts:
        if amount > 0:
            pieces.append({"name": name, "x": round(left, 2), "width": round(100 * amount / total, 2)})
            left += 100 * amount / total
    return {"pieces": pieces}
