"""What a trainer would do, with the client a trainer would use: register, load tasks, submit groups, follow, read."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.resources import files
from typing import Any, NamedTuple

from rollouts.client import ApiError, Client
from rollouts.client.types import GroupSpec, Result
from rollouts.environments.arithmetic import generate

GROUP_SIZE = 4
SUMS = 8
PROBLEMS = 4
POLICY = "demo"
# Short replies: the demo's model writes some 150 tokens a second on two cores, over all rollouts.
SETTINGS = {"sampling": {"temperature": 1.0, "max_tokens": 128}, "timeouts": {"agent": 600}}


class Totals(NamedTuple):
    """The demo's last line."""

    rollouts: int
    terminal: int
    reward_1: int
    groups: int
    mixed_groups: int
    token_exact: int
    turns: int
    sampled_tokens: int

    @property
    def ok(self) -> bool:
        """Everything ended, something was right, and every token is the one that was sampled."""
        return self.terminal == self.rollouts == self.token_exact and self.reward_1 > 0


def prepare(client: Client, llm_url: str) -> None:
    """Register the model server, the two environments and their tasks. What an earlier demo left is used again."""
    for server in list(client.iter_servers()):
        if server["policy"] == POLICY:
            client.remove_server(server["id"])
    client.register_server(url=llm_url, policy=POLICY, capacity=64)
    registered = {environment["name"] for environment in client.iter_environments()}
    if "arithmetic" not in registered:
        client.create_environment(name="arithmetic", handler="arithmetic", description="Sums of small numbers.")
    if "math" not in registered:
        client.create_environment(
            name="math", handler="math", config={"max_turns": 3}, description="Competition problems, with Python at hand."
        )
    _load_tasks(client, "arithmetic", {f"{task['a']}+{task['b']}": task for task in generate(seed=0, count=25, max_value=5)})
    _load_tasks(client, "math", {problem["id"]: problem for problem in _problems()})


def _problems() -> list[dict[str, Any]]:
    """Real competition problems, from the example data of NVIDIA NeMo Gym (Apache-2.0)."""
    return [json.loads(line) for line in files("prorl_site.demo").joinpath("math.jsonl").read_text().splitlines()]


def _load_tasks(client: Client, environment: str, tasks: dict[str, dict[str, Any]]) -> None:
    try:
        dataset = client.create_dataset(name=environment, environment=environment)
    except ApiError as error:
        if error.status == 409:
            return
        raise
    client.add_tasks(dataset["id"], [{"key": key, "payload": payload} for key, payload in tasks.items()])


def submit(client: Client) -> str:
    """One run of groups over both environments; its id."""
    run = client.create_run(name="demo", policy=POLICY, settings=SETTINGS)
    sums = [f"{task['a']}+{task['b']}" for task in generate(seed=0, count=SUMS, max_value=5)]
    groups: list[GroupSpec] = [{"dataset": "arithmetic", "key": key, "n": GROUP_SIZE} for key in sums]
    # Problems with a short answer: comparing long expressions takes longer than the demo's model needs to be wrong.
    problems = [problem for problem in _problems() if len(problem["expected_answer"]) <= 12]
    groups += [{"dataset": "math", "key": problem["id"], "n": GROUP_SIZE} for problem in problems[:PROBLEMS]]
    client.submit_groups(run["id"], groups)
    return run["id"]


def by_group(rollouts: list[Result]) -> list[list[Result]]:
    """The rollouts of each group, the groups in an order that a person can follow."""
    groups: defaultdict[str, list[Result]] = defaultdict(list)
    for rollout in sorted(rollouts, key=lambda rollout: (rollout["environment"], rollout["task_key"], rollout["index"])):
        groups[rollout["group"]].append(rollout)
    return list(groups.values())


def total(rollouts: list[Result], submitted: int) -> Totals:
    """Sum up the finished rollouts of a run of `submitted` ones."""
    groups = by_group(rollouts)
    return Totals(
        rollouts=submitted,
        terminal=len(rollouts),
        reward_1=sum(rollout["reward"] == 1 for rollout in rollouts),
        groups=len(groups),
        mixed_groups=sum(len({rollout["reward"] for rollout in group}) > 1 for group in groups),
        token_exact=sum(rollout["fidelity"] == "token-exact" for rollout in rollouts),
        turns=sum(rollout["turns"] for rollout in rollouts),
        sampled_tokens=sum(rollout["sampled_tokens"] for rollout in rollouts),
    )
