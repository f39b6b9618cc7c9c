"""`/metrics` for Prometheus. Any web process answers for the whole fleet: everything is read from the database."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterator

from django.conf import settings
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from rollouts.metrics import CATALOGUE, Kind
from rollouts.selectors.metrics import counters, gauges, histograms

# Several scrapers, or one that asks often, cost the database one reading in this time.
_CACHE_SECONDS = 5


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus text: for everyone (PRORL_METRICS_PUBLIC), who has the token (PRORL_METRICS_TOKEN), or else this host only."""
    if not _may_read(request):
        text = "Set PRORL_METRICS_TOKEN and send it as a bearer token, or set PRORL_METRICS_PUBLIC=1.\n"
        return HttpResponse(text, status=401, content_type="text/plain", headers={"WWW-Authenticate": 'Bearer realm="metrics"'})
    return HttpResponse(cache.get_or_set("metrics", exposition, _CACHE_SECONDS), content_type=CONTENT_TYPE_PLAIN_0_0_4)


def exposition() -> bytes:
    """All metrics as Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Catalogue())
    return generate_latest(registry)


def _may_read(request: HttpRequest) -> bool:
    if settings.METRICS_PUBLIC:
        return True
    if settings.METRICS_TOKEN:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        return hmac.compare_digest(given.encode(), settings.METRICS_TOKEN.encode())
    return _is_from_this_host(request)


def _is_from_this_host(request: HttpRequest) -> bool:
    """A request that came through a proxy is not, even where the proxy runs here."""
    if "X-Forwarded-For" in request.headers or "Forwarded" in request.headers:
        return False
    try:
        return ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False


class _Catalogue(Collector):
    def collect(self) -> Iterator[Metric]:
        numbers = {**gauges(), **counters()}
        observed = histograms()
        for metric in CATALOGUE:
            if metric.kind is Kind.HISTOGRAM:
                family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
                for labels, seen in observed[metric].items():
                    family.add_metric(labels, seen.cumulative, seen.total)
                yield family
                continue
            kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            plain = kind(metric.name, metric.meaning, labels=metric.labels)
            for labels, value in numbers[metric].items():
                plain.add_metric(labels, value)
            yield plain
