"""Pictures in tasks: the guide's environment shows them to a model, and what none can be shown is refused with the task."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from pydantic import ValidationError

from rollouts.engine.deadlines import Deadline
from rollouts.engine.records import TurnRecord
from rollouts.engine.stages import eval_stage, run_stage
from rollouts.environments.base import EnvironmentConfig, EvalContext, RunContext, TaskPayload
from rollouts.environments.pictures import TaskPicture, picture_message, picture_of
from rollouts.llm.capabilities import Feature
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.pictures import MAX_PIXELS, PICTURE_TYPES
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import Sampling
from tests.pictures import png
from tests.unit.test_agent_tools_guide import GUIDE, block_with

CHART = png(40, 30, (255, 0, 0))
HUGE = CHART.data[:16] + (20_000).to_bytes(4, "big") * 2 + CHART.data[24:]


class Task(TaskPayload):
    chart: TaskPicture


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Turns(list[TurnRecord]):
    """A store in memory."""

    async def turn(self, record: TurnRecord) -> None:
        self.append(record)


async def test_the_environment_of_the_guide_shows_its_picture() -> None:
    guide = block_with("ReadChart", GUIDE.with_name("environments.md"))
    task = guide["ChartTask"](question="What colour? [[reply:red]]", chart=encoded(CHART.data), answer="red")
    environment, config, turns, client = guide["ReadChart"](), EnvironmentConfig(), Turns(), ModelClient()
    async with ScriptedServer(pictures=True) as server:
        route = FixedRoute(server.address(features=[Feature.GENERATE]))
        conversation = Conversation(client, route, Sampling(), call_timeout=20)
        ctx = RunContext(config, task, None, conversation, turns)
        outcome = await run_stage(environment, ctx, deadline=Deadline.after(20, "its 20 s"))
        await client.close()
    assert [message.pictures for message in turns[0].messages] == [(CHART,), ()]
    ended = EvalContext(config, task, outcome.artefacts, None)
    assert (await eval_stage(environment, ended, deadline=Deadline.after(20, "its 20 s"))).total == 1.0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (7, "in base64, as a string"),
        ("data:image/png;base64," + encoded(CHART.data), "nothing before it, such as `data:`"),
        (encoded(b"<svg/>"), ", ".join(PICTURE_TYPES)),
        (encoded(CHART.data[:12]), "does not say how large"),
        (encoded(HUGE), f"at most {MAX_PIXELS}"),
    ],
)
def test_what_no_model_is_shown_is_refused(value: Any, why: str) -> None:
    with pytest.raises(ValidationError, match="chart") as raised:
        Task(chart=value)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (CHART.data, "image/png"),
        (b"\xff\xd8\xff\xc0\x00\x11\x08\x00\x0b\x00\x0a\x03" + b"\x01\x11\x00" * 3 + b"\xff\xd9", "image/jpeg"),
        (b"GIF89a\x0a\x00\x0b\x00\x00\x00\x00;", "image/gif"),
        (b"RIFF\x1e\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x00\x00\x00\x00\x09\x00\x00\x0a\x00\x00", "image/webp"),
    ],
)
def test_a_picture_is_known_by_its_data(data: bytes, mime: str) -> None:
    assert Task(chart=encoded(data)).chart.mime == mime


def test_the_size_is_not_looked_for_through_any_number_of_headers() -> None:
    """8 MB of them took seconds, in which everything else waited."""

    def jpeg(headers: int) -> bytes:
        return (
            b"\xff\xd8" + b"\xff\xe2\x00\x02" * headers + b"\xff\xc0\x00\x11\x08\x00\x0b\x00\x0a\x03" + bytes(9) + b"\xff\xd9"
        )

    assert picture_of(jpeg(500)).mime == "image/jpeg"
    with pytest.raises(ValueError, match="does not say how large"):
        picture_of(jpeg(100_000))


def test_its_schema_says_what_it_is() -> None:
    chart = Task.model_json_schema()["properties"]["chart"]
    assert (chart["type"], chart["contentEncoding"]) == ("string", "base64")


def test_without_pictures_a_message_is_text() -> None:
    assert picture_message("hello") == {"role": "user", "content": "hello"}
