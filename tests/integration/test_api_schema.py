"""The OpenAPI schema: free of warnings, true to the views, and readable offline."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

import pytest
from django.test import Client
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema

from rollouts.api.urls import v1


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    with GENERATOR_STATS.silence():
        GENERATOR_STATS.reset()
        generated: dict[str, Any] = SchemaGenerator().get_schema(request=None, public=True)
        assert not GENERATOR_STATS, [*GENERATOR_STATS._warn_cache, *GENERATOR_STATS._error_cache]
    return generated


def operations(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation for path, item in schema["paths"].items() for method, operation in item.items()
    }


def test_the_schema_is_valid_openapi_3_1(schema: dict[str, Any]) -> None:
    assert schema["openapi"] == "3.1.0"
    validate_schema(schema)


def test_every_path_is_described(schema: dict[str, Any]) -> None:
    assert len(schema["paths"]) == len(v1)
    names = [operation["operationId"] for operation in operations(schema).values()]
    assert len(names) == len(set(names))


def test_every_operation_wants_a_key_and_describes_its_problems(schema: dict[str, Any]) -> None:
    for name, operation in operations(schema).items():
        assert {"apiKey": []} in operation["security"], name
        problem = operation["responses"]["4XX"]["content"]["application/problem+json"]["schema"]
        assert problem == {"$ref": "#/components/schemas/Problem"}, name


def test_every_creating_operation_offers_an_idempotency_key(schema: dict[str, Any]) -> None:
    for name, operation in operations(schema).items():
        headers = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "header"}
        assert ("Idempotency-Key" in headers) == ("201" in operation["responses"]), name


def test_bodies_name_their_fields(schema: dict[str, Any]) -> None:
    components = schema["components"]["schemas"]
    naming = {"task_id", "dataset", "key", "environment", "payload"}
    assert set(components["NewGroup"]["properties"]) == {"n", "require_policy_version", *naming}
    assert components["NewGroup"]["additionalProperties"] is False
    assert "$ref" in str(components["NewRunRequest"]["properties"]["settings"])
    assert "api_key" not in components["LLMServer"]["properties"]


def test_the_schema_and_its_pages_are_served_without_a_key(db: None) -> None:
    client = Client()
    answer = client.get("/api/schema/?format=json")
    assert answer.status_code == 200
    assert answer.json()["info"]["title"] == "ProRL Site"
    page = client.get("/api/docs/").content.decode()
    assert "https://" not in page
    sources = re.findall(r'src="([^"]+)"', page)
    assert sources
    assert all(source.startswith("/static/") for source in sources)
    for source in sources:
        with closing(client.get(source)) as answer:
            assert answer.status_code == 200
