"""Counters and histograms of the whole fleet."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models


class MetricSeries(models.Model):
    """One number of one metric of `rollouts.metrics`; only ever grows.

    A histogram has a row for each of its buckets that counted anything (not cumulative), and one for the sum of what it saw.
    """

    SUM = "sum"

    id = models.BigAutoField(primary_key=True)
    name = models.CharField(max_length=60)
    labels: models.JSONField[Any, Any] = models.JSONField(default=dict, help_text="Label -> value.")
    part = models.CharField(max_length=20, blank=True, help_text="Of a histogram: a bucket's upper bound, or sum.")
    value = models.FloatField(default=0)

    class Meta:
        ordering: ClassVar = ["name", "labels"]
        verbose_name_plural = "metric series"
        constraints: ClassVar = [models.UniqueConstraint(fields=["name", "labels", "part"], name="metric_series_once")]

    def __str__(self) -> str:
        return f"{self.name} {self.labels} {self.part}".strip()
