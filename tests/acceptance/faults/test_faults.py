"""Each fault strikes once; `make faults` is the long form of the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.acceptance.faults.audit import audit_leftovers
from tests.acceptance.faults.scenario import play
from tests.acceptance.faults.site import Site, running_site
from tests.acceptance.faults.table import FAULTS, Fault
from tests.services import rabbitmq

_ROLLOUTS = 40


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if reason := rabbitmq.why_missing():
        pytest.skip(reason)
    with running_site(tmp_path_factory.mktemp("faults")) as site:
        yield site


@pytest.fixture
def site(whole_site: Site) -> Iterator[Site]:
    yield whole_site
    whole_site.mend()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: re.sub(r"\W+", "-", fault.name))
def test_nothing_is_lost_or_doubled(site: Site, fault: Fault):
    verdict = play(site, fault, rounds=1, rollouts=_ROLLOUTS).verdict
    assert verdict, str(verdict)


def test_nothing_is_left_behind_by_all_of_them(site: Site):
    verdict = audit_leftovers(site)
    assert verdict, str(verdict)
