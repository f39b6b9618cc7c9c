"""Images built by real maintenance workers, which are killed, stopped and told to give up."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.platform import Platform, running_platform
from tests.unit.image_archives import Tar, open_folder

REGISTER = """
import json
from sandboxes.images.services import builds, registry
for name, kind, source in json.loads({images!r}):
    builds.request_build(image=registry.register_image(name=name, kind=kind, source=source))
"""
CANCEL = """
from sandboxes.images.services.builds import cancel_build
from sandboxes.models import ImageBuild
print(cancel_build(build=ImageBuild.objects.get(image__name={name!r})))
"""


@pytest.fixture(scope="module")
def shared_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("images") / "platform"
    with open_folder() as images, running_platform(folder, image_dir=images) as running:
        yield running


@pytest.fixture
def platform(shared_platform: Platform) -> Iterator[Platform]:
    """Without processes and images; those of a test end with it."""
    yield shared_platform
    for name in shared_platform.processes:
        shared_platform.kill(name)
    shared_platform.manage("shell", "--no-imports", "-c", "from sandboxes.models import Image; Image.objects.all().delete()")


@pytest.fixture
def slow_mirror() -> Iterator[int]:
    """The port of a server that takes connections and says nothing: what is built from it goes on and on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def register(platform: Platform, *images: tuple[str, str, dict[str, Any]]) -> None:
    platform.manage("shell", "--no-imports", "-c", REGISTER.format(images=json.dumps(images)))


def slow(name: str, port: int) -> tuple[str, str, dict[str, Any]]:
    return name, "debian", {"suite": "bookworm", "variant": "extract", "mirror": f"http://127.0.0.1:{port}/debian"}


def tarball(name: str, folder: Path) -> tuple[str, str, dict[str, Any]]:
    path = folder / f"{name}.tar"
    path.write_bytes(Tar().add("motd", name.encode()).data())
    return name, "tarball", {"path": str(path)}


def start_maintenance(platform: Platform, builds: int = 2) -> None:
    platform.spawn("maintenance", "django", "maintain", "--builds", str(builds))


def build(platform: Platform, name: str) -> dict[str, Any]:
    query = "SELECT b.* FROM sandboxes_imagebuild b JOIN sandboxes_image i ON i.id = b.image_id WHERE i.name = %s"
    return platform.rows(query, name)[0]


def wait_for_step(platform: Platform, name: str) -> None:
    platform.wait_for(lambda: "putting together" in build(platform, name)["step"], f"{name} to be in the middle of its build")


def programs(port: int) -> list[str]:
    """Command lines of what still builds from that mirror."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"127.0.0.1:{port}/debian" in line:
            lines.append(line)
    return lines


def test_one_that_hangs_holds_up_no_other_and_ends_when_it_is_cancelled(platform: Platform, tmp_path: Path, slow_mirror: int):
    register(platform, slow("hangs", slow_mirror), *(tarball(f"quick{n}", tmp_path) for n in range(5)))
    platform.start_dispatcher()
    start_maintenance(platform)
    ready = "SELECT count(*) FROM sandboxes_image WHERE state = 'ready'"
    platform.wait_for(lambda: platform.value(ready) == 5, "the other images")
    wait_for_step(platform, "hangs")
    assert programs(slow_mirror)
    assert "True" in platform.manage("shell", "--no-imports", "-c", CANCEL.format(name="hangs"))
    platform.wait_for(lambda: build(platform, "hangs")["state"] == "cancelled", "the cancel")
    assert programs(slow_mirror) == []
    assert "cancelled" in build(platform, "hangs")["log_tail"]
    assert platform.value("SELECT state FROM sandboxes_image WHERE name = 'hangs'") == "pending"


def test_a_killed_worker_s_build_is_tried_again_and_its_programs_are_gone(platform: Platform, slow_mirror: int):
    register(platform, slow("hangs", slow_mirror))
    start_maintenance(platform)  # and no dispatcher: a worker finds what there is without being told
    wait_for_step(platform, "hangs")
    first = build(platform, "hangs")
    workspace = Path(platform.env["PRORL_IMAGE_DIR"]) / "tmp"
    assert len(list(workspace.iterdir())) == 1
    platform.kill("maintenance")
    platform.wait_for(lambda: programs(slow_mirror) == [], "its programs to end")
    platform.start_dispatcher()
    platform.wait_for(lambda: build(platform, "hangs")["state"] == "queued", "the dispatcher to take it back")
    assert "fell silent" in build(platform, "hangs")["error"]
    start_maintenance(platform)
    platform.wait_for(lambda: build(platform, "hangs")["tries"] == 2, "another try")
    wait_for_step(platform, "hangs")
    second = build(platform, "hangs")
    assert second["owner"] != first["owner"]
    platform.wait_for(lambda: len(list(workspace.iterdir())) == 1, "the first try's leftovers to be removed")


def test_a_worker_that_is_stopped_gives_its_build_back(platform: Platform, slow_mirror: int):
    register(platform, slow("hangs", slow_mirror))
    start_maintenance(platform)
    wait_for_step(platform, "hangs")
    platform.terminate("maintenance")
    assert platform.processes["maintenance"].returncode == 0
    given_back = build(platform, "hangs")
    assert (given_back["state"], given_back["tries"], given_back["owner"]) == ("queued", 0, None)
    assert programs(slow_mirror) == []
    assert list((Path(platform.env["PRORL_IMAGE_DIR"]) / "tmp").iterdir()) == []
