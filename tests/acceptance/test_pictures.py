"""Rollouts of real processes whose model sees: what it was shown lies in Postgres, with its places among the ids."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.platform import Platform, install_environments, running_platform
from tests.pictures import png

MODEL, DRAWN = png(40, 30, (255, 0, 0)), png(20, 60, (0, 0, 255))
CODE = f"class Drawing:\n    def _repr_png_(self): return bytes.fromhex('{DRAWN.data.hex()}')\nDrawing()"
CALL = f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': CODE}})}</tool_call>"
TASK = {"question": f"[[reply:{CALL}]][[reply2:{CALL}]][[reply3:Like this.]]", "model": base64.b64encode(MODEL.data).decode()}

_SUBMIT = """
import json
from rollouts.models import Project
from rollouts.services import registry, servers, submit
project, is_new = Project.objects.get_or_create(name="alpha")
if is_new:
    registry.create_environment(project=project, name="drawing", handler="drawing", config={{}})
    servers.register_server(project=project, url={url!r}, policy="sees", capacity=8)
run = submit.create_run(project=project, name="run", policy="sees", settings={{}})
submit.submit_groups(run=run, groups=[submit.GroupRequest(n=2, environment="drawing", payload={payload!r})])
print(json.dumps(str(run.id)))
"""
_PICTURES = """
SELECT p.message, m.role, p.mime, p.blob_id FROM rollouts_messagepicture p
JOIN rollouts_message m ON (m.rollout_id, m.attempt, m.index) = (p.rollout_id, p.attempt, p.message)
WHERE p.rollout_id = %s ORDER BY p.message, p.index
"""


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    with running_platform(tmp_path / "var", db_pool_size=2) as running:
        install_environments(running, tmp_path, drawing="tests.acceptance.drawing_environment:Drawing")
        running.start_execution()
        yield running


def test_what_was_shown_is_stored(platform: Platform, seeing_model: str) -> None:
    run_id = platform.shell(_SUBMIT.format(url=seeing_model, payload=TASK))
    platform.wait_until_all_finished()
    rollouts = platform.rows("SELECT * FROM rollouts_rollout WHERE run_id = %s", run_id)
    assert {(row["state"], row["fidelity"], row["attempt"]) for row in rollouts} == {("succeeded", "token-exact", 1)}, (
        platform.tails()
    )
    for rollout in rollouts:
        assert [tuple(row.values()) for row in platform.rows(_PICTURES, rollout["id"])] == [
            (0, "user", "image/png", MODEL.digest),
            (2, "tool", "image/png", DRAWN.digest),
            (4, "tool", "image/png", DRAWN.digest),
        ]
        calls = platform.rows("SELECT * FROM rollouts_modelcall WHERE rollout_id = %s ORDER BY turn", rollout["id"])
        assert [digests(call) for call in calls] == [[MODEL.digest], [DRAWN.digest], [DRAWN.digest]]
    assert platform.value("SELECT count(*) FROM rollouts_blob") == 2  # equal data is stored once
    assert "6 calls checked; attempts: 2 token-exact; 0 wrong" in platform.manage("check_tokens", "--all")


def digests(call: dict[str, Any]) -> list[str]:
    return [digest for _, _, digest in call["placed"]]
