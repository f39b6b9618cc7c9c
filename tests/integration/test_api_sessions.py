"""Sessions over HTTP: agents outside any sandbox, as those who run them see it."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from rollouts.lifecycle import GATEWAY, Stage
from rollouts.models import IdempotentResponse, ModelCall, Project, Reward, Rollout, Run, Session, WorkerProcess
from rollouts.scheduling.load import read_load
from rollouts.selectors.nodes import node_rows
from rollouts.services.lease import register_worker
from rollouts.services.reap import reap
from rollouts.services.session_holding import find_session
from tests.integration.api_case import ApiCase, expect_problem

PATH = "/api/v1/sessions/"


def start_gateway() -> uuid.UUID:
    return register_worker(node="test-node", stage=GATEWAY, pid=1, concurrency=0)


@pytest.fixture
def case(db: None) -> ApiCase:
    case = ApiCase()
    start_gateway()
    return case


def open_session(case: ApiCase, **body: Any) -> dict[str, Any]:
    answer = case.submitter.post(PATH, body or {"policy": "tiny"})
    assert answer.status_code == 201, answer.content
    opened: dict[str, Any] = answer.json()
    return opened


def path_of(session: dict[str, Any], verb: str = "") -> str:
    return f"{PATH}{session['id']}/{verb}"


def close(case: ApiCase, session: dict[str, Any], **body: Any) -> dict[str, Any]:
    answer = case.submitter.post(path_of(session, "close/"), body)
    assert answer.status_code == 200, answer.content
    closed: dict[str, Any] = answer.json()
    return closed


def call_of(rollout: Rollout, turn: int = 0, text: str = "4", sampled: list[int] | None = None) -> None:
    ModelCall.objects.create(
        rollout=rollout,
        attempt=rollout.attempt,
        turn=turn,
        segment=0,
        context_ids=[1, 2],
        sampled_ids=[3] if sampled is None else sampled,
        text=text,
        finish_reason="stop",
        prompt_tokens=2,
        policy="tiny",
        policy_version=0,
        latency=0.1,
    )
    Rollout.objects.filter(pk=rollout.pk).update(turns=turn + 1)


class TestOpening:
    def test_a_session_is_a_rollout_that_runs(self, case: ApiCase) -> None:
        session = open_session(case, policy="tiny", metadata={"user": "ada"}, ttl_seconds=90)
        assert (session["open"], session["state"], session["ttl_seconds"]) == (True, "running", 90)
        assert session["base_urls"]["openai"] == session["base_urls"]["anthropic"] + "/v1"
        rollout = Rollout.objects.get(pk=session["id"])
        assert (rollout.state, rollout.attempt, rollout.lease_owner.stage) == ("running", 1, GATEWAY)
        assert rollout.task.payload == {"metadata": {"user": "ada"}}
        assert rollout.run.name == "sessions"
        moves = rollout.events.values_list("from_state", "to_state")
        assert list(moves) == [("", "queued"), ("queued", "initializing"), ("initializing", "ready"), ("ready", "running")]

    def test_the_key_is_stored_as_a_hash_and_shown_once(self, case: ApiCase) -> None:
        session = open_session(case)
        assert session["key"].startswith(session["key_prefix"])
        assert str(find_session(key=session["key"]).rollout_id) == session["id"]
        assert find_session(key=session["key"] + "x") is None
        assert session["key"] not in str(Session.objects.values())
        assert "key" not in case.owner.get(path_of(session)).json()

    def test_a_repeated_request_opens_one_session_and_gives_a_key_that_works(self, case: ApiCase) -> None:
        first, again = (case.submitter.post(PATH, {"policy": "tiny"}, HTTP_IDEMPOTENCY_KEY="one").json() for _ in range(2))
        assert first["id"] == again["id"]
        assert find_session(key=again["key"]) is not None
        assert find_session(key=first["key"]) is None
        assert "prs_" not in str(IdempotentResponse.objects.values())

    def test_sessions_of_a_policy_share_a_run(self, case: ApiCase) -> None:
        assert open_session(case)["run"] == open_session(case)["run"]
        assert Run.objects.filter(name="sessions").count() == 1

    @pytest.mark.parametrize("how", ["id", "name"])
    def test_a_run_can_be_named(self, case: ApiCase, how: str) -> None:
        run = case.domain.run
        assert open_session(case, run=str(getattr(run, how)))["run"] == str(run.id)

    @pytest.mark.parametrize("how", ["task_id", "key"])
    def test_a_session_may_work_on_a_task_of_the_project(self, case: ApiCase, how: str) -> None:
        task = case.domain.task
        chosen = {"task_id": str(task.id)} if how == "task_id" else {"dataset": "sums", "key": "one"}
        session = open_session(case, policy="tiny", task=chosen)
        assert (session["task"], session["environment"]) == (str(task.id), "sums")

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({}, "/run"),
            ({"run": "run", "policy": "tiny"}, "/run"),
            ({"run": "no such"}, "/run"),
            ({"policy": "no such"}, "/policy"),
            ({"policy": "tiny", "ttl_seconds": 1}, "/ttl_seconds"),
            ({"policy": "tiny", "task": {"task_id": str(uuid.uuid4())}}, "/task/task_id"),
            ({"policy": "tiny", "task": {"dataset": "sums", "key": "two"}}, "/task/key"),
            ({"policy": "tiny", "task": {}}, "/task"),
            ({"policy": "tiny", "colour": "red"}, "/colour"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, case: ApiCase, body: dict[str, Any], pointer: str) -> None:
        before = case.row_counts()
        expect_problem(case.submitter.post(PATH, body), 422, "invalid", pointer)
        assert case.row_counts() == before

    def test_anothers_task_and_run_are_not_there(self, case: ApiCase) -> None:
        body = {"policy": "tiny", "task": {"task_id": str(case.other.task.id)}}
        expect_problem(case.submitter.post(PATH, body), 422, "invalid", "/task/task_id")
        expect_problem(case.submitter.post(PATH, {"run": str(case.other.run.id)}), 422, "invalid", "/run")

    def test_without_a_gateway_none_is_opened(self, db: None) -> None:
        case = ApiCase()
        problem = expect_problem(case.submitter.post(PATH, {"policy": "tiny"}), 503, "unavailable")
        assert "prorl gateway" in problem["detail"]

    def test_a_cancelled_run_takes_none(self, case: ApiCase) -> None:
        case.owner.post(f"/api/v1/runs/{case.domain.run.id}/cancel/")
        expect_problem(case.submitter.post(PATH, {"run": str(case.domain.run.id)}), 409, "conflict")

    @pytest.mark.parametrize("owner", ["run", "project"])
    @pytest.mark.parametrize(
        ("limit", "status", "code"),
        [
            ("max_in_flight", 429, "too_many_queued"),
            ("max_queued", 429, "too_many_queued"),
            ("max_rollouts", 402, "budget_exhausted"),
        ],
    )
    def test_limits_hold(self, case: ApiCase, owner: str, limit: str, status: int, code: str) -> None:
        model, row = (Run, case.domain.run) if owner == "run" else (Project, case.domain.project)
        model._default_manager.filter(pk=row.pk).update(**{limit: 1})
        run = str(case.domain.run.id)
        session = open_session(case, run=run)
        before = case.row_counts()
        problem = expect_problem(case.submitter.post(PATH, {"run": run}), status, code)
        assert (problem["limit"]["scope"], problem["limit"]["name"]) == (owner, limit)
        assert case.row_counts() == before
        if limit == "max_in_flight":
            close(case, session)
            open_session(case, run=run)

    def test_access(self, case: ApiCase) -> None:
        case.check_write_access("post", PATH, {"policy": "tiny"}, own=False)
        case.check_list_access(PATH)


class TestReading:
    def test_lists_are_of_the_own_project(self, case: ApiCase) -> None:
        case.domain.submit()
        session = open_session(case)
        [listed] = case.reader.get(PATH).json()["results"]
        assert listed["id"] == session["id"]
        assert case.stranger.get(PATH).json()["results"] == []

    def test_pages(self, case: ApiCase) -> None:
        ids = [open_session(case)["id"] for _ in range(3)]
        first = case.reader.get(PATH, {"limit": 2}).json()
        rest = case.reader.get(first["next"]).json()
        assert [session["id"] for session in first["results"] + rest["results"]] == ids[::-1]

    def test_a_session_shows_who_opened_it(self, case: ApiCase) -> None:
        session = case.check_read_access(path_of(open_session(case)))
        assert session["opened_by"].startswith("API key ")


class TestSignsOfLife:
    def test_a_heartbeat_puts_the_end_off(self, case: ApiCase) -> None:
        session = open_session(case)
        Session.objects.update(expires_at=timezone.now() + timedelta(seconds=1))
        case.check_write_access("post", path_of(session, "heartbeat/"))
        renewed = case.submitter.post(path_of(session, "heartbeat/")).json()
        assert renewed["expires_at"] > session["expires_at"]

    def test_a_silent_agent_is_given_up_and_nothing_is_repeated(self, case: ApiCase) -> None:
        session = open_session(case)
        assert reap() == 0
        Session.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
        assert reap() == 1
        ended = case.owner.get(path_of(session)).json()
        assert (ended["state"], ended["reward"], ended["trainable"]) == ("failed", None, False)
        assert (ended["termination"]["cause"], ended["termination"]["blame"]) == ("agent_lost", "caller")
        expect_problem(case.submitter.post(path_of(session, "heartbeat/")), 409, "conflict")
        assert "agent_lost" in find_session(key=session["key"]).ended

    def test_a_lost_gateway_takes_no_session_with_it(self, case: ApiCase) -> None:
        session = open_session(case)
        reap()
        WorkerProcess.objects.update(lease_expires_at=timezone.now() - timedelta(minutes=1))
        reap()
        assert Rollout.objects.get().lease_owner.lost_at is not None
        assert case.owner.get(path_of(session)).json()["open"]

    def test_a_long_session_is_not_stuck(self, case: ApiCase) -> None:
        session = open_session(case)
        Rollout.objects.update(state_changed_at=timezone.now() - timedelta(days=1))
        reap()
        assert case.owner.get(path_of(session)).json()["open"]
        assert Rollout.objects.get().stuck_at is None


class TestClosing:
    @pytest.mark.parametrize(
        ("reward", "total"),
        [
            ({"value": 0.5}, 0.5),
            ({"components": [{"name": "a", "value": 1.0}, {"name": "b", "value": 0.5, "weight": 2.0}]}, 2.0),
            ({"components": [{"name": "a", "value": 1.0}, {"name": "b", "value": None}]}, None),
        ],
    )
    @pytest.mark.parametrize("before", [True, False])
    def test_the_reward_that_was_given_counts(
        self, case: ApiCase, reward: dict[str, Any], total: float | None, before: bool
    ) -> None:
        session = open_session(case)
        call_of(Rollout.objects.get())
        if before:
            case.check_write_access("post", path_of(session, "reward/"), reward)
            assert case.submitter.post(path_of(session, "reward/"), reward).status_code == 200
            closed = close(case, session)
        else:
            closed = close(case, session, reward=reward)
        assert (closed["state"], closed["reward"], closed["trainable"]) == ("succeeded", total, total is not None)
        assert closed["termination"]["cause"] == "completed"
        assert closed["fidelity"] == "token-exact"
        names = list(Reward.objects.values_list("name", flat=True))
        assert names == [c["name"] for c in reward.get("components", [{"name": "reward"}])]

    def test_the_last_word_on_the_reward_counts(self, case: ApiCase) -> None:
        session = open_session(case)
        case.submitter.post(path_of(session, "reward/"), {"value": 0.1})
        case.submitter.post(path_of(session, "reward/"), {"value": 0.2})
        assert close(case, session, reward={"value": 0.3})["reward"] == 0.3

    def test_without_a_reward_there_is_none(self, case: ApiCase) -> None:
        session = open_session(case)
        call_of(Rollout.objects.get())
        closed = close(case, session)
        assert (closed["state"], closed["reward"], closed["trainable"]) == ("succeeded", None, False)
        assert not Reward.objects.exists()

    def test_a_session_without_calls_is_nothing_to_train_on(self, case: ApiCase) -> None:
        closed = close(case, open_session(case), reward={"value": 1.0})
        assert (closed["reward"], closed["trainable"]) == (1.0, False)

    def test_what_the_environment_can_score_it_scores(self, case: ApiCase) -> None:
        session = open_session(case, policy="tiny", task={"dataset": "sums", "key": "one"})
        rollout = Rollout.objects.get()
        call_of(rollout, text="It is 3.")
        closed = close(case, session)
        assert closed["state"] == "evaluating"
        claim = case.domain.claim(rollout, Stage.EVAL)
        assert (claim.artefacts, claim.termination_cause) == ({"answer": "It is 3."}, "completed")

    def test_artefacts_are_kept_however_it_ends(self, case: ApiCase) -> None:
        session = open_session(case)
        close(case, session, outcome="failed", artefacts={"log": "no disk"}, detail="no disk")
        rollout = case.owner.get(f"/api/v1/rollouts/{session['id']}/").json()
        assert rollout["artefacts"] == {"log": "no disk"}
        assert rollout["termination"]["detail"] == "no disk"

    @pytest.mark.parametrize(
        ("outcome", "state", "cause", "blame"),
        [
            ("completed", "succeeded", "completed", "policy"),
            ("max_turns", "succeeded", "max_turns", "policy"),
            ("failed", "failed", "agent_failed", "caller"),
            ("abandoned", "cancelled", "cancelled", "caller"),
        ],
    )
    def test_outcomes(self, case: ApiCase, outcome: str, state: str, cause: str, blame: str) -> None:
        session = open_session(case)
        case.submitter.post(path_of(session, "reward/"), {"value": 1.0})
        for _ in range(2):  # whoever lost the answer asks again
            closed = close(case, session, outcome=outcome)
            assert (closed["state"], closed["termination"]["cause"]) == (state, cause)
            assert closed["termination"]["blame"] == blame
            assert closed["reward"] == (1.0 if blame == "policy" else None)
        assert Rollout.objects.get().attempts.get().ended_at is not None

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({"outcome": "failed", "reward": {"value": 1.0}}, "/reward"),
            ({"outcome": "won"}, "/outcome"),
            ({"reward": {}}, "/reward/value"),
            ({"reward": {"value": 1.0, "components": [{"name": "a", "value": 1.0}]}}, "/reward/value"),
            ({"reward": {"components": [{"name": "a", "value": 1.0}, {"name": "a", "value": 1.0}]}}, "/reward"),
            ({"reward": {"components": []}}, "/reward/components"),
            ({"reward": {"value": "1"}}, "/reward/value"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, case: ApiCase, body: dict[str, Any], pointer: str) -> None:
        session = open_session(case)
        expect_problem(case.submitter.post(path_of(session, "close/"), body), 422, "invalid", pointer)
        assert case.owner.get(path_of(session)).json()["open"]

    def test_what_came_from_outside_is_not_scored_again(self, case: ApiCase) -> None:
        session = open_session(case)
        close(case, session, reward={"value": 1.0})
        problem = expect_problem(case.submitter.post(f"/api/v1/rollouts/{session['id']}/rescore/", {}), 409, "conflict")
        assert "rewarded by whoever runs their agents" in problem["detail"]

    def test_text_only_calls_give_their_badge_and_nothing_to_train_on(self, case: ApiCase) -> None:
        session = open_session(case)
        call_of(Rollout.objects.get(), sampled=[])
        closed = close(case, session, reward={"value": 1.0})
        assert closed["last_call_at"] is not None
        assert (closed["fidelity"], closed["reward"], closed["trainable"]) == ("text-only", 1.0, False)

    def test_after_the_end_nothing_is_taken(self, case: ApiCase) -> None:
        session = open_session(case)
        close(case, session, reward={"value": 1.0})
        for verb, body in (
            ("reward/", {"value": 0.0}),
            ("heartbeat/", None),
            ("close/", {"outcome": "failed"}),
            ("close/", {"reward": {"value": 0.0}}),
        ):
            expect_problem(case.submitter.post(path_of(session, verb), body), 409, "conflict")
        assert case.owner.get(path_of(session)).json()["reward"] == 1.0

    def test_access(self, case: ApiCase) -> None:
        session = open_session(case)
        case.check_write_access("post", path_of(session, "close/"), {})
        case.check_write_access("delete", path_of(session))
        assert case.owner.get(path_of(session)).json()["open"]


class TestCancelling:
    @pytest.mark.parametrize("how", ["session", "rollout", "run"])
    def test_its_holder_is_asked_and_calls_are_refused(self, case: ApiCase, how: str) -> None:
        session = open_session(case)
        if how == "session":
            assert case.submitter.delete(path_of(session)).status_code == 204
        else:
            path = f"/api/v1/{how}s/{session['id' if how == 'rollout' else 'run']}/cancel/"
            assert case.submitter.post(path).json() == {"cancelled": 1}
        assert "cancel" in find_session(key=session["key"]).ended


def test_a_node_that_only_serves_the_gateway_has_no_worker(case: ApiCase) -> None:
    [node] = node_rows()
    assert (node.state, [process.stage for process in node.processes]) == ("absent", [GATEWAY])


def test_sessions_take_room_of_servers_but_of_no_node(case: ApiCase) -> None:
    case.domain.worker(Stage.RUN, concurrency=4)
    open_session(case)
    load = read_load()
    assert load.nodes["test-node"].stages[Stage.RUN].held == 0
    assert load.policies[case.domain.policy.id].running == 1
    assert load.projects[case.domain.project.id] == 1
