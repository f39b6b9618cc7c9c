"""The real Apptainer: its other name, sandboxes as instances, and what goes through spython."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandboxes.backends.apptainer.program import Program, find_program, process_options
from sandboxes.backends.apptainer.spython_calls import Caller, SpythonFailed, build_image, labels_of, version
from sandboxes.backends.roots.ownership import sandbox_user
from sandboxes.backends.staging import shared_folder
from sandboxes.errors import BackendUnavailable, SandboxLost
from sandboxes.options import NodeOptions
from sandboxes.protocol import HOST, Backend, Changes, Root, SandboxSpec
from sandboxes.registry import get_backend
from sandboxes.selfcheck.framework import host_processes_with, marker
from sandboxes.selfcheck.samples import directory_root, sif_root

_DEFINITION = """Bootstrap: localimage
From: {base}

%files
    {file} /srv/added

%labels
    Purpose test
"""


@pytest.fixture(scope="module")
def program() -> Program:
    try:
        return find_program("", sandbox_user())
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the sandboxes' host user can enter and write to."""
    folder = shared_folder() / f"test-{os.getpid()}"
    for path in (folder, *(folder / name for name in ("tmp", "cache", "config"))):
        path.mkdir()
        if sandbox_user() is not None:
            os.chown(path, sandbox_user() or -1, -1)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def instances(program: Program, tmp_path: Path) -> AsyncIterator[Backend]:
    backend = get_backend("apptainer", tmp_path, NodeOptions(apptainer_instances=True))
    yield backend
    for name in await backend.list():
        await backend.stop(name)


def _apptainer(program: Program, *arguments: str) -> str:
    """Apptainer's own answer to an administrator."""
    config = Path.home() / ".apptainer" if sandbox_user() is None else shared_folder() / "instances"
    options = process_options(sandbox_user(), Path("/nonexistent"), config)
    return subprocess.run([program.path, *arguments], capture_output=True, text=True, check=True, **options).stdout


async def test_singularity_is_another_name_for_it(program: Program, tmp_path: Path):
    name = str(Path(program.path).with_name("singularity"))
    if not Path(name).exists():
        pytest.skip(f"this installation has no {name}")
    backend = get_backend("apptainer", tmp_path, NodeOptions(apptainer=name))
    assert (await backend.probe())["binary"] == name
    try:
        await backend.start("named", SandboxSpec())
        session = await backend.connect("named")
        assert (await session.bash("echo $HOME", timeout=10)).output == "/home/agent\n"
        await session.close()
    finally:
        await backend.stop("named")


@pytest.mark.parametrize("changes", [Changes.MEMORY, Changes.DISK])
@pytest.mark.parametrize("kind", ["host", "directory", "sif"])
async def test_a_sandbox_can_be_an_instance(kind: str, changes: Changes, instances: Backend, program: Program):
    root: Root = {"host": lambda: HOST, "directory": directory_root, "sif": sif_root}[kind]()
    await instances.start("one", SandboxSpec(changes=changes), root)
    assert "-one " in _apptainer(program, "instance", "list")
    session = await instances.connect("one")
    assert (await session.bash("cd /tmp && echo $((6 * 7)) > x && cat x", timeout=10)).output == "42\n"
    await session.close()
    await instances.stop("one")
    assert "-one " not in _apptainer(program, "instance", "list")
    assert await instances.list() == []


async def test_what_an_administrator_ends_is_lost_and_can_be_stopped(instances: Backend, program: Program):
    await instances.start("one", SandboxSpec())
    session = await instances.connect("one")
    text = marker()
    await session.bash(f"(setsid bash -c 'exec -a {text} sleep 600' &)", timeout=10)
    name = next(line.split()[0] for line in _apptainer(program, "instance", "list").splitlines() if "-one " in line)
    _apptainer(program, "instance", "stop", "--timeout", "1", name)
    with pytest.raises(SandboxLost):
        await session.ping()
    await instances.stop("one")
    assert host_processes_with(text) == []
    assert await instances.list() == []


async def test_an_instance_without_a_directory_is_found_and_stopped(instances: Backend, program: Program):
    await instances.start("one", SandboxSpec())
    await instances.rename("one", "two")
    assert await instances.list() == ["two"]
    shutil.rmtree(instances.state_dir / "two")
    assert await instances.list() == ["one"]  # its instance's name
    await instances.stop("one")
    assert await instances.list() == []
    assert "-one " not in _apptainer(program, "instance", "list")


async def test_images_are_built_and_inspected(program: Program, folder: Path):
    caller = Caller(program.path, folder, sandbox_user())
    assert program.version in await version(caller)
    (folder / "added").write_text("from the definition\n")
    definition, lines = folder / "image.def", list[str]()
    definition.write_text(_DEFINITION.format(base=directory_root().path, file=folder / "added"))
    labels = await build_image(caller, str(definition), folder / "image.sif", timeout=120, on_line=lines.append)
    assert labels["Purpose"] == "test"
    assert any("Build complete" in line for line in lines)
    with pytest.raises(SpythonFailed, match=r"inspect: .*added is no image"):
        await labels_of(caller, folder / "added")


async def test_a_build_may_print_much(folder: Path):
    chatty, lines = folder / "chatty", list[str]()
    chatty.write_text('#!/bin/sh\nif [ "$1" = build ]; then seq 100000 >&2; exit 3; fi\n')
    chatty.chmod(0o755)
    with pytest.raises(SpythonFailed, match=r"(?s)build: exit code 3: .*100000"):
        await build_image(Caller(str(chatty), folder), "x.def", folder / "image.sif", timeout=120, on_line=lines.append)
    assert lines[:100000] == [str(number + 1) for number in range(100000)]


async def test_a_build_that_fails_says_why(program: Program, folder: Path):
    definition = folder / "image.def"
    definition.write_text("Bootstrap: localimage\nFrom: /nowhere.sif\n")
    with pytest.raises(SpythonFailed, match=r"(?s)build: exit code \d+: .*/nowhere\.sif"):
        await build_image(Caller(program.path, folder, sandbox_user()), str(definition), folder / "image.sif", timeout=60)


async def test_a_call_that_does_not_end_is_ended_with_all_it_started(folder: Path):
    text = marker()
    hanging = folder / "hanging"
    hanging.write_text(f"#!/bin/bash\nbash -c 'exec -a {text} sleep 600'\n")
    hanging.chmod(0o755)
    with pytest.raises(SpythonFailed, match=r"build: no end within 2 s"):
        await build_image(Caller(str(hanging), folder), "x.def", folder / "image.sif", timeout=2)
    async with asyncio.timeout(10):
        while host_processes_with(text):
            await asyncio.sleep(0.05)
