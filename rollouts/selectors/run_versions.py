"""Which versions of its policy a run's rollouts were sampled from."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from django.db.models import Count, F
from django.db.models.functions import Coalesce

from rollouts.models import Rollout, Run

from .run_summary import SAMPLE

MOST_SHOWN = 8


class RunVersions(NamedTuple):
    """The newest finished rollouts of a run (at most `SAMPLE`) by the version of their newest token, newest first.

    `earlier` are those of versions that are not listed, `mixed` those with tokens of several versions. `staleness_mean` and
    `staleness_most` are the policy's version now minus that of their oldest token.
    """

    newest: list[tuple[int, int]]  # (version, rollouts)
    earlier: int
    mixed: int
    total: int
    staleness_mean: float
    staleness_most: int


def run_versions(run: Run) -> RunVersions | None:
    """None when no rollout with a sampled token has finished."""
    newest = Rollout.objects.filter(run=run, finished_xid__isnull=False).order_by("-finished_xid", "-id").values("pk")[:SAMPLE]
    sampled = Rollout.objects.filter(pk__in=newest, policy_version__isnull=False).order_by()
    oldest = Coalesce("oldest_version", F("policy_version"))
    spans = list(sampled.values_list("policy_version").annotate(oldest=oldest, n=Count("id")))
    if not spans:
        return None
    by_version: Counter[int] = Counter()
    for version, _, n in spans:
        by_version[version] += n
    total = by_version.total()
    listed = sorted(by_version.items(), reverse=True)[:MOST_SHOWN]
    current = max(run.policy.version, *(version for version, *_ in spans))
    return RunVersions(
        newest=listed,
        earlier=total - sum(n for _, n in listed),
        mixed=sum(n for version, old, n in spans if old != version),
        total=total,
        staleness_mean=sum((current - old) * n for _, old, n in spans) / total,
        staleness_most=max(current - old for _, old, _ in spans),
    )
