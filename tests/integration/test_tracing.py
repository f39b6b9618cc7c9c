"""Traces of finished rollouts, as a collector receives them over HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from prorl_site.tracing import Traces
from rollouts.lifecycle import Stage, State
from rollouts.models import ModelCall, Rollout, RolloutEvent, ToolCall
from tests.integration.domain import Domain


class Collector(ThreadingHTTPServer):
    """Keeps the spans it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Collector)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def finished_rollout(domain: Domain) -> Rollout:
    """One with a model call that asked for a tool, half a second into RUN."""
    rollout = domain.rollout_in(State.SUCCEEDED)
    began_run = RolloutEvent.objects.get(rollout=rollout, to_state=State.RUNNING.value).at
    tool_began = began_run + timedelta(seconds=0.5)
    ModelCall.objects.create(
        rollout=rollout,
        attempt=1,
        turn=0,
        context_ids=[1],
        sampled_ids=[2],
        finish_reason="stop",
        prompt_tokens=1,
        policy="tiny",
        policy_version=3,
        latency=0.25,
        at=tool_began + timedelta(seconds=2),
    )
    ToolCall.objects.create(rollout=rollout, attempt=1, turn=0, index=0, name="bash", started_at=tool_began, duration=1.5)
    return rollout


def test_a_dispatcher_that_sends_no_traces_does_not_load_opentelemetry():
    code = (
        "import sys, django; django.setup(); import rollouts.management.commands.dispatch, prorl_site.asgi; "
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0


@pytest.mark.django_db(transaction=True)
class TestTraces:
    def test_a_rollout_is_one_trace_with_its_own_id_and_its_stages_calls_and_tools(self, collector: Collector):
        traces = Traces(collector.url)
        rollout = finished_rollout(Domain())
        traces.export()
        traces.export()
        traces.close()
        assert {span.trace_id for span in collector.spans} == {rollout.id.bytes}
        names = {span.span_id: span.name for span in collector.spans}
        tree = sorted((names.get(span.parent_span_id, ""), span.name) for span in collector.spans)
        assert tree == [
            ("", "rollout"),
            ("rollout", Stage.EVAL.value),
            ("rollout", Stage.INIT.value),
            ("rollout", Stage.RUN.value),
            ("run", "model call"),
            ("run", "tool bash"),
        ]

    def test_times_are_those_of_the_record(self, collector: Collector):
        traces = Traces(collector.url)
        finished_rollout(Domain())
        traces.export()
        traces.close()
        spans = {span.name: span for span in collector.spans}
        call, tool = spans["model call"], spans["tool bash"]
        assert call.end_time_unix_nano == tool.start_time_unix_nano
        assert (call.end_time_unix_nano - call.start_time_unix_nano) / 1e9 == pytest.approx(0.25, abs=1e-5)
        assert (tool.end_time_unix_nano - tool.start_time_unix_nano) / 1e9 == pytest.approx(1.5, abs=1e-5)
        assert abs(spans["rollout"].end_time_unix_nano / 1e9 - datetime.now(UTC).timestamp()) < 60

    def test_a_failure_of_the_infrastructure_is_an_error(self, collector: Collector):
        domain = Domain()
        traces = Traces(collector.url)
        rollout = domain.rollout_in(State.SUCCEEDED)
        Rollout.objects.filter(id=rollout.id).update(
            termination_blame="infrastructure", termination_detail="the node is gone", reward=None
        )
        traces.export()
        traces.close()
        (root,) = [span for span in collector.spans if not span.parent_span_id]
        assert (root.status.code, root.status.message) == (2, "the node is gone")

    def test_what_finished_before_traces_were_wanted_is_not_sent(self, collector: Collector):
        domain = Domain()
        domain.rollout_in(State.SUCCEEDED)
        Rollout.objects.update(finished_xid=1)
        first = Rollout.objects.get()
        domain.rollout_in(State.SUCCEEDED)
        Rollout.objects.exclude(id=first.id).update(finished_xid=2)
        traces = Traces(collector.url)
        traces.export()
        traces.close()
        assert first.id.bytes not in {span.trace_id for span in collector.spans}
