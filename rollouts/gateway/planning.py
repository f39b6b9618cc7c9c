"""What to send for a request: from which earlier reply it goes on, and the ids of its prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollouts.gateway.branches import Branches, Key, Point, key_of_ids, keys_of
from rollouts.gateway.errors import refuse
from rollouts.gateway.passing import takes_messages_only
from rollouts.gateway.prompts import in_words
from rollouts.gateway.requests import ModelRequest
from rollouts.llm.client import ModelClient
from rollouts.llm.messages import pictures_in
from rollouts.llm.placed import expands_alike
from rollouts.llm.route import Route
from rollouts.llm.sampler import ask
from rollouts.llm.toolformats import HERMES, ToolFormat, tool_format
from rollouts.llm.turns import Tools
from rollouts.llm.types import NOTHING, ChatMessage, SegmentCause, TokenPrompt

MAX_TOOLS_CHARACTERS = 500_000  # renders of them are kept


@dataclass
class Plan:
    """What one call will send. `segment` is the one it goes on in, reserved for it, or None when it begins a new one.

    `point` is the reply that it goes on from, and `answered` how many of the messages lead up to there.
    """

    offer: Key
    keys: list[Key]
    prompt: TokenPrompt = NOTHING
    context: TokenPrompt = NOTHING
    segment: int | None = None
    point: Point | None = None
    answered: int = 0
    not_continued: SegmentCause | None = None  # why it begins a new segment although it goes on from an earlier reply
    shown: Tools | None = None  # the tools, when the template has a place for them
    is_text: bool = False  # the server takes messages and no ids


class Planner:
    """Plans the calls of one session."""

    def __init__(self, client: ModelClient, route: Route, branches: Branches) -> None:
        self._client = client
        self._route = route
        self._branches = branches

    async def plan(self, request: ModelRequest, *, reserve: bool = True) -> Plan:
        """With `reserve`, a segment that the call can go on in is its own until `release`.

        Raises `ModelError`, and `ContextOverflow` where a server does not even render a prompt that is too long.
        """
        if request.prompt is not None:
            if takes_messages_only(self._route.server):
                raise refuse("prompt", "the session's model takes messages, no raw prompts")
            return await self._plan_raw(request.prompt, reserve=reserve)
        offer = _offer_key(request)
        keys = keys_of(request.messages)
        if takes_messages_only(self._route.server):
            return self._plan_without_ids(offer, keys)
        plan = Plan(offer, keys, shown=await self._shown_tools(request))
        if (same := self._branches.same_prompt(offer, keys)) and same.length:
            plan.prompt = plan.context = self._branches.leading_to(same)
            return plan
        found = self._branches.latest_point(offer, keys)
        if found is None:
            plan.prompt = plan.context = await self._render(request, plan.shown)
            return plan
        plan.point, plan.answered = found
        if reserve and self._branches.reserve(found[0]):
            plan.segment = found[0].segment
        try:
            await self._fill(plan, request, *found)
        except BaseException:
            self.release(plan)
            raise
        return plan

    def _plan_without_ids(self, offer: Key, keys: list[Key]) -> Plan:
        plan = Plan(offer, keys, is_text=True)
        if found := self._branches.latest_point(offer, keys):
            plan.point, plan.answered = found
            plan.not_continued = SegmentCause.NO_IDS
        return plan

    async def _plan_raw(self, prompt: str | tuple[int, ...], *, reserve: bool) -> Plan:
        """Of a raw prompt only the ids count: it goes on in a segment that they begin with."""
        if isinstance(prompt, str):
            text = prompt
            ids = await ask(self._route, lambda server: self._client.encode(server, text))
        else:
            ids = list(prompt)
        plan = Plan("", [key_of_ids(ids)], TokenPrompt(ids), TokenPrompt(ids))
        end = self._branches.extended(ids)
        if end is not None and reserve and self._branches.reserve(end):
            plan.segment, plan.context = end.segment, TokenPrompt(ids[end.length :])
        return plan

    def tool_format(self, plan: Plan) -> ToolFormat:
        """How the model writes calls in reply: in its own way, unless it was told another."""
        return tool_format(self._route.server.tool_format) if plan.shown else HERMES

    def hand_over(self, plan: Plan) -> Plan:
        """The same for whoever stores the call: `release` of `plan` does nothing any more, only that of the other."""
        handed, plan.segment = replace(plan), None
        return handed

    def release(self, plan: Plan) -> None:
        """The call is stored, or came to nothing."""
        if plan.segment is not None:
            self._branches.release(plan.segment)
            plan.segment = None

    def why_new(self, request: ModelRequest, plan: Plan) -> tuple[SegmentCause, int | None]:
        """Why a segment begins, and which one it branches off. Asked when it does: other calls may have ended meanwhile."""
        if same := self._branches.same_prompt(plan.offer, plan.keys):
            return SegmentCause.SIBLING, same.segment
        if plan.point is not None:
            return plan.not_continued or SegmentCause.SIBLING, plan.point.segment
        if not len(self._branches.segments):
            return SegmentCause.START, None
        if not request.messages:
            return SegmentCause.SUBAGENT, None
        until_user = next((n for n, m in enumerate(request.messages, 1) if m["role"] == "user"), len(request.messages))
        segment, shared = self._branches.shared(plan.keys)
        return (SegmentCause.EDITED, segment) if shared >= until_user else (SegmentCause.SUBAGENT, None)

    async def _fill(self, plan: Plan, request: ModelRequest, point: Point, answered: int) -> None:
        """The ids of a plan that goes on from `point`."""
        context = await self._continuation(request, plan.shown, point, answered)
        whole = self._branches.leading_to(point).followed_by(context or NOTHING)
        if context is None or not expands_alike(whole, self._route.server.picture_id):
            self.release(plan)
            plan.not_continued = _why_not(point)
            plan.prompt = plan.context = await self._render(request, plan.shown)
            return
        plan.prompt = whole
        plan.context = whole if plan.segment is None else context

    async def _render(self, request: ModelRequest, tools: Tools | None) -> TokenPrompt:
        self._refuse_unseen(request, request.messages)
        messages = request.messages if tools else in_words(request.messages, request.tools)
        return await ask(
            self._route, lambda server: self._client.render(server, messages, add_generation_prompt=True, tools=tools)
        )

    async def _continuation(
        self, request: ModelRequest, tools: Tools | None, point: Point, answered: int
    ) -> TokenPrompt | None:
        last_id = point.last_id
        if last_id is None:
            return None
        new: Sequence[ChatMessage] = request.messages[answered:]
        self._refuse_unseen(request, new)
        reply: ChatMessage = {"role": "assistant", "content": point.reasoned}
        if tools:
            reply["tool_calls"] = request.messages[answered - 1].get("tool_calls", [])
        else:
            new = in_words(new, ())
        return await ask(
            self._route, lambda server: self._client.turns.continuation(server, last_id, [reply], new, tools=tools)
        )

    def _refuse_unseen(self, request: ModelRequest, messages: Sequence[ChatMessage]) -> None:
        """Before they are rendered: what a server says of a picture that its model cannot see names no field."""
        if self._route.server.picture_id is None and pictures_in(messages):
            raise refuse(request.pictures_at or "messages", "the session's model takes no pictures; send text only")

    async def _shown_tools(self, request: ModelRequest) -> Tools | None:
        if not request.tools:
            return None
        tools = [tool.described() for tool in request.tools]
        shown = await ask(self._route, lambda server: self._client.turns.shows_tools(server, tools))
        return tools if shown else None


def _offer_key(request: ModelRequest) -> Key:
    if not request.tools:
        return ""
    written = json.dumps([tool.described() for tool in request.tools], sort_keys=True)
    if len(written) > MAX_TOOLS_CHARACTERS:
        raise refuse("tools", f"must be up to {MAX_TOOLS_CHARACTERS} characters together, not {len(written)}")
    return keys_of([{"role": "system", "content": written}])[0]


def _why_not(point: Point) -> SegmentCause:
    if point.last_id is None:
        return SegmentCause.NO_IDS
    return SegmentCause.CUT if point.was_cut else SegmentCause.TEMPLATE
