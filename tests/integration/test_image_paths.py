"""Images may lie anywhere: the characters of a path that mean something to mount, bubblewrap or Apptainer mean nothing here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.staging import shared_folder
from sandboxes.errors import BackendUnavailable
from sandboxes.protocol import Changes, Root, SandboxSpec
from sandboxes.registry import get_backend
from sandboxes.selfcheck.samples import FACT, TEXT, directory_root


@pytest.fixture(scope="module")
def odd_root() -> Iterator[Root]:
    sample = directory_root()
    path = shared_folder() / f'odd-{os.getpid()} a,b:c\\d "e" $f'
    shutil.copytree(sample.path, path, symlinks=True)
    if (user := sandbox_user()) is not None:
        for entry in (path, *path.rglob("*")):
            os.chown(entry, user, user, follow_symlinks=False)
    yield replace(sample, path=str(path), digest="odd")
    shutil.rmtree(path)


@pytest.mark.parametrize("changes", Changes)
@pytest.mark.parametrize("name", ["bubblewrap", "apptainer"])
async def test_an_image_with_an_odd_path_can_be_started(name: str, changes: Changes, odd_root: Root, tmp_path: Path):
    backend = get_backend(name, tmp_path)
    try:
        await backend.probe()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    try:
        await backend.start("odd", SandboxSpec(changes=changes), odd_root)
        session = await backend.connect("odd")
        result = await session.bash(f"cat {FACT}; echo changed 2>/dev/null > {FACT}; cat {FACT}", timeout=30)
        await session.close()
    finally:
        await backend.stop("odd")
    assert result.output == TEXT + (TEXT if changes is Changes.REFUSED else "changed\n")
    assert Path(odd_root.path, FACT.lstrip("/")).read_text() == TEXT
