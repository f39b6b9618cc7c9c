"""Scoring again through the API."""

from __future__ import annotations

from uuid import uuid4

import pytest

from rollouts.lifecycle import Stage
from rollouts.models import Rescoring
from rollouts.services.rescoring import claim_rescorings, finish_rescoring
from tests.integration.api_case import ApiCase, expect_problem
from tests.integration.test_rescore import RIGHT, eval_failed, newer_version, ran, scored


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


def test_a_rollout(case: ApiCase):
    rollout = eval_failed(case.domain)
    path = f"/api/v1/rollouts/{rollout.id}"
    case.check_write_access("post", f"{path}/rescore/")
    assert not Rescoring.objects.exists()
    answer = case.submitter.post(f"{path}/rescore/")
    assert answer.status_code == 202
    asked = answer.json()
    assert (asked["state"], asked["rollout"], asked["environment_version"]) == ("queued", str(rollout.id), 1)
    assert case.submitter.post(f"{path}/rescore/", {}).json() == asked
    [claim] = claim_rescorings(owner=case.domain.worker(Stage.EVAL).id, working_on=[], limit=1)
    assert finish_rescoring(claim=claim, score=RIGHT)
    [done] = case.check_read_access(f"{path}/rescorings/")["results"]
    assert (done["id"], done["state"], done["reward_version"], done["reward_before"]) == (asked["id"], "done", 1, None)
    shown = case.owner.get(f"{path}/").json()
    assert (shown["state"], shown["reward"], shown["reward_version"]) == ("succeeded", 1.0, 1)


def test_a_run_with_a_newer_version_and_a_cause(case: ApiCase):
    rollout, newer = eval_failed(case.domain), newer_version(case.domain)
    path = f"/api/v1/runs/{rollout.run_id}"
    body = {"environment": str(newer.id), "only_cause": "evaluation_error"}
    case.check_write_access("post", f"{path}/rescore/", body)
    answer = case.submitter.post(f"{path}/rescore/", body)
    assert (answer.status_code, answer.json()) == (202, {"queued": 1, "going_on": 0, "left_out": 0})
    [rescoring] = case.check_read_access(f"{path}/rescorings/")["results"]
    assert (rescoring["environment_version"], rescoring["state"]) == (2, "queued")
    problem = expect_problem(case.submitter.post(f"/api/v1/rollouts/{rollout.id}/rescore/"), 409, "conflict")
    assert "version 2" in problem["detail"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"environment": str(uuid4())}, "/environment"),
        ({"environment": "sums"}, "/environment"),
        ({"only_cause": "bad luck"}, "/only_cause"),
        ({"cause": "evaluation_error"}, "/cause"),
    ],
)
def test_what_makes_no_sense_is_refused(case: ApiCase, body: dict[str, str], pointer: str):
    rollout = scored(case.domain)
    expect_problem(case.submitter.post(f"/api/v1/runs/{rollout.run_id}/rescore/", body), 422, "invalid", pointer)
    assert not Rescoring.objects.exists()


def test_one_that_is_not_over_is_a_conflict(case: ApiCase):
    problem = expect_problem(case.submitter.post(f"/api/v1/rollouts/{ran(case.domain).id}/rescore/"), 409, "conflict")
    assert problem["detail"] == "It has not ended yet."


@pytest.mark.parametrize("kind", ["runs", "rollouts"])
def test_of_nothing_is_not_found(case: ApiCase, kind: str):
    expect_problem(case.submitter.post(f"/api/v1/{kind}/{uuid4()}/rescore/"), 404, "not_found")
