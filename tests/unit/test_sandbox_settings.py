"""The part of an environment's configuration that describes its sandbox."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollouts.environments.errors import ValidationFailed
from rollouts.environments.registry import config_schema, get, validate_config, validate_task
from rollouts.environments.sandbox_settings import LimitSettings, SandboxSettings
from sandboxes.protocol import Bind, Changes, Limits, NetworkMode, NetworkPolicy, SandboxSpec


def test_settings_left_out_are_those_of_the_platform() -> None:
    assert SandboxSettings().to_spec() == SandboxSpec()


def test_every_limit_can_be_set() -> None:
    assert set(LimitSettings.model_fields) == {field.name for field in dataclasses.fields(Limits)}


def test_settings_become_a_spec() -> None:
    settings = SandboxSettings.model_validate(
        {
            "image": "python-3.12",
            "changes": "disk",
            "fakeroot": True,
            "network": {"mode": "allow_list", "allow": ["pypi.org", "*.pythonhosted.org"]},
            "limits": {"memory_mb": 4096, "cpus": 1.5},
        }
    )
    binds = (Bind("/data", "/data"),)
    spec = settings.to_spec(env={"A": "b"}, binds=binds)
    assert spec == SandboxSpec(
        limits=Limits(memory_mb=4096, cpus=1.5),
        env={"A": "b"},
        binds=binds,
        image="python-3.12",
        changes=Changes.DISK,
        fakeroot=True,
        network=NetworkPolicy(NetworkMode.ALLOW_LIST, ("pypi.org", "*.pythonhosted.org")),
    )
    assert settings.to_spec(image="of-the-task").image == "of-the-task"


@pytest.mark.parametrize(
    ("sandbox", "pointer", "message"),
    [
        ({"network": {"mode": "open"}}, "/sandbox/network/mode", "'none', 'allow_list' or 'full'"),
        ({"network": {"mode": "allow_list"}}, "/sandbox/network", "at least one entry"),
        ({"network": {"allow": ["pypi.org"]}}, "/sandbox/network", "set the mode to 'allow_list'"),
        (
            {"network": {"mode": "allow_list", "allow": ["pypi.org", "https://pypi.org"]}},
            "/sandbox/network/allow/1",
            "write for instance 'pypi.org'",
        ),
        ({"network": {"mode": "allow_list", "allow": ["127.0.0.1:5432"]}}, "/sandbox/network/allow/0", "can never be allowed"),
        ({"limits": {"memory_mb": 0}}, "/sandbox/limits/memory_mb", "greater than or equal to 64"),
        ({"limits": {"ram": 5}}, "/sandbox/limits/ram", "not permitted"),
        ({"changes": "tape"}, "/sandbox/changes", "'memory', 'disk' or 'refused'"),
        ({"root": True}, "/sandbox/root", "not permitted"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_where_they_stand(sandbox: Any, pointer: str, message: str) -> None:
    with pytest.raises(ValidationFailed) as raised:
        validate_config("math", {"sandbox": sandbox})
    [problem] = raised.value.problems
    assert problem.pointer == pointer
    assert message in problem.message


def test_the_math_environment_heeds_its_sandbox_settings() -> None:
    config = validate_config("math", {"sandbox": {"limits": {"memory_mb": 512}, "network": {"mode": "full"}}})
    task = validate_task("math", {"question": "1 + 1", "expected_answer": "2"})
    spec = get("math").sandbox_spec(config, task)
    assert spec is not None
    assert (spec.limits.memory_mb, spec.network.mode) == (512, NetworkMode.FULL)
    assert "PYTHONPATH" in spec.env
    assert "sandbox" in config_schema("math")["properties"]
