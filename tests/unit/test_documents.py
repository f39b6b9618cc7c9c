"""Documents lead somewhere: their links do, and the index names all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollouts.lifecycle import Cause, Phase, Termination, final_state

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    lost = []
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", document.read_text()):
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(f"{path}#{anchor}")
    assert lost == []


def test_every_guide_and_reference_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page for folder in ("guide", "reference") for page in (ROOT / "docs" / folder).glob("*.md")]
    assert [page.name for page in pages if page.name not in index] == []


def test_every_way_to_end_is_explained() -> None:
    rows = (ROOT / "docs" / "reference" / "endings.md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows if row.startswith("| `")]
    told = {cause: (state, blame) for causes, state, blame in cells for cause in re.findall(r"`(\w+)`", causes)}
    endings = [Termination(Phase.RUN, cause) for cause in Cause]
    assert told == {ending.cause: (final_state(ending), ending.blame) for ending in endings}
