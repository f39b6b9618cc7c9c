"""Images over the API, in the dashboard and in the admin; what is refused for want of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from rollouts.environments import registry
from rollouts.environments.base import EnvironmentConfig, PlainEnvironment, TaskPayload
from rollouts.environments.sandbox_settings import SandboxSettings
from rollouts.models import Project
from rollouts.services.errors import Refused
from rollouts.services.images import prune
from rollouts.services.registry import TaskRequest, add_tasks, create_dataset, create_environment
from rollouts.services.submit import GroupRequest, create_run, submit_groups
from sandboxes.images.services.builds import Report, claim_build, report_build, request_build
from sandboxes.images.services.use import image_store
from sandboxes.images.services.verification import request_verification, take_verification
from sandboxes.images.store import Store
from sandboxes.models import Image, ImageBuild
from sandboxes.protocol import SandboxSpec
from tests.integration.api_case import ApiCase, client_for, expect_problem, secret_for
from tests.integration.domain import Domain
from tests.integration.image_case import DAY, SOURCE, an_image, claimed, fail, finish, stored_image

pytestmark = pytest.mark.django_db


@pytest.fixture
def store(tmp_path: Path, settings: Any) -> Store:
    settings.IMAGE_DIR = tmp_path / "images"
    return image_store()


class TestTheApi:
    @pytest.fixture
    def case(self) -> ApiCase:
        return ApiCase()

    @pytest.fixture
    def operator(self, case: ApiCase) -> Any:
        return client_for(secret_for(case.domain.project, "operate"))

    def test_any_key_may_look(self, case: ApiCase):
        fail(claimed(an_image()))
        case.check_list_access("/api/v1/images/")
        case.check_list_access("/api/v1/images/busy/")
        listed = case.reader.get("/api/v1/images/").json()["results"]
        assert [(image["name"], image["state"]) for image in listed] == [("busy", "failed")]
        found = case.reader.get("/api/v1/images/busy/").json()
        assert found["source"] == SOURCE
        assert found["builds"][0]["error"] == "mirror away"
        assert found["builds"][0]["log"] == "<b>a log</b>\n"
        expect_problem(case.reader.get("/api/v1/images/other/"), 404, "not_found")

    def test_pages(self, case: ApiCase):
        for number in range(3):
            an_image(f"i{number}")
        page = case.reader.get("/api/v1/images/?limit=2").json()
        assert [image["name"] for image in page["results"]] == ["i2", "i1"]
        assert [image["name"] for image in case.reader.get(page["next"]).json()["results"]] == ["i0"]

    @pytest.mark.parametrize("path", ["", "busy/build/", "busy/cancel/"])
    def test_changes_need_operate(self, case: ApiCase, path: str):
        an_image()
        body = {"name": "other", "kind": "tarball", "source": SOURCE} if not path else {}
        case.check_write_access("post", f"/api/v1/images/{path}", body, needs="admin", own=False)
        expect_problem(case.owner.post(f"/api/v1/images/{path}", body), 403, "insufficient_scope")
        expect_problem(case.stranger.post(f"/api/v1/images/{path}", body), 403, "insufficient_scope")
        assert list(Image.objects.values_list("name", flat=True)) == ["busy"]
        assert not ImageBuild.objects.exists()

    def test_register_build_cancel(self, operator: Any):
        created = operator.post("/api/v1/images/", {"name": "busy", "kind": "tarball", "source": SOURCE})
        assert created.status_code == 201
        assert created.json()["state"] == "pending"
        first = operator.post("/api/v1/images/busy/build/", {"force": True}).json()
        assert (first["number"], first["state"], first["force"]) == (1, "queued", True)
        assert operator.post("/api/v1/images/busy/build/", {}).json()["number"] == 1
        assert operator.post("/api/v1/images/busy/cancel/", {}).json()["state"] == "cancelled"
        expect_problem(operator.post("/api/v1/images/busy/cancel/", {}), 409, "conflict")
        expect_problem(operator.post("/api/v1/images/other/build/", {}), 404, "not_found")

    def test_what_makes_no_sense_is_pointed_at(self, operator: Any):
        path = "/api/v1/images/"
        expect_problem(
            operator.post(path, {"name": "busy", "kind": "tarball", "source": {"path": "x"}}), 422, "invalid", "/source/path"
        )
        expect_problem(operator.post(path, {"name": "busy", "kind": "zip"}), 422, "invalid", "/kind")
        expect_problem(operator.post(path, {"name": "Busy", "kind": "tarball", "source": SOURCE}), 422, "invalid", "/name")
        expect_problem(operator.post(path, {"name": "b", "kind": "oci", "format": "iso"}), 422, "invalid", "/format")
        an_image()
        expect_problem(operator.post(path, {"name": "busy", "kind": "tarball", "source": SOURCE}), 409, "conflict")

    def test_repeated_under_one_key_registers_once(self, operator: Any):
        body = {"name": "busy", "kind": "tarball", "source": SOURCE}
        for _ in range(2):
            assert operator.post("/api/v1/images/", body, headers={"Idempotency-Key": "k1"}).status_code == 201
        assert Image.objects.count() == 1


class TestThePages:
    @pytest.fixture
    def admin(self, admin_client: Client) -> Client:
        return admin_client

    @pytest.fixture
    def member(self, domain: Domain) -> Client:
        user = User.objects.create_user("ann")
        domain.project.members.add(user)
        client = Client()
        client.force_login(user)
        return client

    def test_nobody_sees_them(self):
        for path in (reverse("images"), reverse("images-live"), reverse("image", args=["busy"])):
            assert Client().get(path).status_code == 302

    def test_without_images_the_page_says_how_to_begin(self, member: Client):
        assert b"prorl images register" in member.get(reverse("images")).content

    def test_the_list_shows_states_and_progress(self, member: Client):
        finish(claimed(an_image("fine")))
        request_build(image=an_image("busy"))
        claim = claim_build(node="n1")
        assert claim is not None
        report_build(claim=claim, report=Report(0.42, "unpacking", "", 0))
        page = member.get(reverse("images")).content.decode()
        assert "5.0" in page
        assert "42%" in page
        assert 'id="image-fine"' in page

    def test_a_page_shows_the_log_as_text(self, member: Client):
        fail(claimed(an_image()), "<script>no</script>")
        page = member.get(reverse("image", args=["busy"])).content.decode()
        assert "&lt;b&gt;a log&lt;/b&gt;" in page
        assert "&lt;script&gt;no" in page
        assert "<script>no" not in page
        assert member.get(reverse("image", args=["other"])).status_code == 404

    def test_the_live_part_is_sent_only_when_something_has_changed(self, member: Client):
        request_build(image=an_image())
        claim = claim_build(node="n1")
        assert claim is not None
        finish(claim)
        path = reverse("image-live", args=["busy"])
        first = member.get(path)
        assert first.status_code == 200
        tag = first.headers["ETag"]
        assert member.get(path, headers={"If-None-Match": tag}).status_code == 304
        request_build(image=Image.objects.get())
        assert member.get(path, headers={"If-None-Match": tag}).status_code == 200

    def test_builds_are_started_and_cancelled_by_those_who_may(self, member: Client, admin: Client):
        an_image()
        for name in ("image-build", "image-cancel"):
            assert member.post(reverse(name, args=["busy"])).status_code == 403
            assert member.get(reverse(name, args=["busy"])).status_code == 405
        assert not ImageBuild.objects.exists()
        assert b"Build" not in member.get(reverse("image-live", args=["busy"])).content.replace(b"Build it here", b"")
        admin.post(reverse("image-build", args=["busy"]))
        assert ImageBuild.objects.get().requested_by == "admin"
        assert b"Cancel the build" in admin.get(reverse("image", args=["busy"])).content
        admin.post(reverse("image-cancel", args=["busy"]))
        assert ImageBuild.objects.get().state == "cancelled"


class TestTheAdmin:
    def post(self, client: Client, **fields: Any) -> Any:
        values = {"name": "busy", "kind": "tarball", "source": '{"path": "/x"}', "format": "directory", "warm_target": 0}
        return client.post(reverse("admin:sandboxes_image_add"), {**values, "description": "", **fields})

    def test_registers(self, admin_client: Client):
        assert self.post(admin_client, warm_target=3).status_code == 302
        image = Image.objects.get()
        assert (image.source, image.warm_target, image.state) == ({"path": "/x"}, 3, "pending")
        page = admin_client.get(reverse("admin:sandboxes_image_change", args=[image.pk])).content.decode()
        assert "Absolute path on the nodes" in page

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"source": '{"path": "x"}'}, "path: String should match"),
            ({"source": "{"}, "Enter a valid JSON"),
            ({"name": "Upper"}, "lower-case"),
            ({"kind": "python", "source": '{"package": "six", "version": "1", "base": "gone"}'}, "no image &#x27;gone&#x27;"),
        ],
    )
    def test_refuses_what_makes_no_sense(self, admin_client: Client, fields: dict[str, Any], said: str):
        answer = self.post(admin_client, **fields)
        assert answer.status_code == 200
        assert said in answer.content.decode()
        assert not Image.objects.exists()

    def test_changes_what_was_changed_and_nothing_else(self, admin_client: Client):
        image = an_image()
        url = reverse("admin:sandboxes_image_change", args=[image.pk])
        fields = {"source": '{"path": "/srv/busy.tar"}', "format": "sif", "description": "new", "warm_target": 1}
        finish(claimed(image))  # while the form was open
        assert admin_client.post(url, fields).status_code == 302
        image.refresh_from_db()
        assert (image.format, image.description, image.warm_target, image.state) == ("sif", "new", 1, "ready")

    def act(self, client: Client, action: str, *images: Image) -> str:
        data = {"action": action, "_selected_action": [image.pk for image in images]}
        if action == "delete_selected":
            data["post"] = "yes"
        return client.post(reverse("admin:sandboxes_image_changelist"), data, follow=True).content.decode()

    def test_actions(self, admin_client: Client):
        image = an_image()
        assert "nothing to verify" in self.act(admin_client, "verify", image)
        assert "1 to be built" in self.act(admin_client, "build", image)
        assert "1 builds cancelled" in self.act(admin_client, "cancel", image)
        finish(claimed(image))
        assert "1 to be verified" in self.act(admin_client, "verify", image)
        self.act(admin_client, "build_anew", image)
        assert ImageBuild.objects.latest("number").force
        assert "is being built" in self.act(admin_client, "delete_selected", image)
        assert Image.objects.exists()
        self.act(admin_client, "cancel", image)
        self.act(admin_client, "delete_selected", image)
        assert not Image.objects.exists()

    def test_builds_are_read_only(self, admin_client: Client):
        fail(claimed(an_image()))
        build = ImageBuild.objects.get()
        assert admin_client.get(reverse("admin:sandboxes_imagebuild_changelist")).status_code == 200
        assert admin_client.get(reverse("admin:sandboxes_imagebuild_change", args=[build.pk])).status_code == 200
        assert admin_client.get(reverse("admin:sandboxes_imagebuild_add")).status_code == 403


def test_a_verification_is_taken_once():
    image = an_image()
    finish(claimed(image))
    image.refresh_from_db()
    request_verification(image=image)
    taken = take_verification()
    assert taken == image
    assert take_verification() is None


class _Config(EnvironmentConfig):
    sandbox: SandboxSettings = SandboxSettings()


class _Task(TaskPayload):
    image: str = ""


class Imaged(PlainEnvironment):
    """Takes its image from the task, else from the configuration."""

    config: ClassVar[type[EnvironmentConfig]] = _Config
    task: ClassVar[type[TaskPayload]] = _Task

    def sandbox_spec(self, config: _Config, task: _Task) -> SandboxSpec:
        if task.image == "broken":
            raise RuntimeError("no spec for this one")
        return config.sandbox.to_spec(image=task.image)


class TestAdmission:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handler = Imaged()
        monkeypatch.setattr(registry, "get", lambda name: handler)

    @pytest.fixture
    def project(self, domain: Domain) -> Project:
        return domain.project

    def environment(self, project: Project, image: str = "") -> None:
        create_environment(project=project, name="imaged", handler="imaged", config={"sandbox": {"image": image}})

    def submit(self, project: Project, *payloads: dict[str, Any]) -> None:
        run = create_run(project=project, name="r", policy=project.policies.first().name)
        submit_groups(run=run, groups=[GroupRequest(n=1, environment="imaged", payload=payload) for payload in payloads])

    @pytest.mark.parametrize(("state", "said"), [("unknown", "register it"), ("pending", "Build it"), ("failed", "log of its")])
    def test_an_environment_whose_image_cannot_be_used_is_refused(self, project: Project, state: str, said: str):
        if state != "unknown":
            image = an_image()
            if state == "failed":
                fail(claimed(image))
        with pytest.raises(Refused) as refused:
            self.environment(project, "busy")
        assert [error.pointer for error in refused.value.errors] == ["/config/sandbox/image"]
        assert said in refused.value.errors[0].detail
        assert not project.environments.filter(name="imaged").exists()

    def test_tasks_whose_image_cannot_be_used_are_refused_and_nothing_is_stored(self, project: Project):
        self.environment(project)
        finish(claimed(an_image()))
        self.submit(project, {"image": "busy"}, {})
        with pytest.raises(Refused) as refused:
            self.submit(project, {"image": "busy"}, {"image": "gone"}, {"image": "later"})
        assert [error.pointer for error in refused.value.errors] == ["/groups/1", "/groups/2"]
        assert "no image 'gone'" in refused.value.errors[0].detail
        assert project.rollouts.count() == 2

    def test_an_image_that_went_missing_refuses_stored_tasks_too(self, project: Project):
        finish(claimed(an_image()))
        self.environment(project, "busy")
        dataset = create_dataset(project=project, name="d", environment="imaged")
        add_tasks(dataset=dataset, tasks=[TaskRequest("t", {})])
        Image.objects.update(state="pending", digest="")
        run = create_run(project=project, name="r", policy=project.policies.first().name)
        with pytest.raises(Refused, match="Some groups"):
            submit_groups(run=run, groups=[GroupRequest(n=1, dataset="d", key="t")])

    def test_a_spec_that_cannot_be_made_is_left_to_the_rollout_which_says_why(self, project: Project):
        self.environment(project)
        self.submit(project, {"image": "broken"})
        assert project.rollouts.count() == 1

    def test_what_environments_and_unfinished_rollouts_need_is_not_pruned(self, project: Project, store: Store):
        named, needed, neither = (stored_image(store, name) for name in ("named", "needed", "neither"))
        self.environment(project, "named")
        self.submit(project, {"image": "needed"})
        assert [item.images for item in prune(unused_for=DAY, most_bytes=None)] == [[neither.name]]
        assert store.digests() == sorted([named.digest, needed.digest])

    def test_check_environment_says_so_too(self, project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text("{}\n")
        with pytest.raises(CommandError, match="no image 'gone'"):
            call_command("check_environment", "imaged", "--tasks", str(tasks), "--config", '{"sandbox": {"image": "gone"}}')
