"""`manage.py policies list|versions|announce|loaded`: policies and the versions of their weights."""

from __future__ import annotations

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rollouts.models import LLMServer, Policy, PolicyVersion
from rollouts.selectors.policies import versions_of
from rollouts.services.errors import Refused
from rollouts.services.policies import announce_version
from rollouts.services.weight_updates import note_weights_in_place

_LOOK_SECONDS = 0.25


class Command(BaseCommand):
    help = "List policies and their versions, have their servers load new weights, or say that these are in place."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list")
        actions.add_parser("versions").add_argument("policy")
        announce = actions.add_parser("announce")
        announce.add_argument("--path", default="", help="A checkpoint that all servers can read.")
        announce.add_argument("--lora", default="", metavar="NAME", help="The path is a LoRA adapter, asked for by this name.")
        announce.add_argument("--mode", default="drain", choices=PolicyVersion.Mode.values)
        announce.add_argument("--no-wait", action="store_true")
        for action in (announce, actions.add_parser("loaded")):
            action.add_argument("policy")
            action.add_argument("version", type=int)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            if options["action"] == "list":
                self._list()
            else:
                getattr(self, f"_{options['action']}")(_find(options["policy"]), options)
        except Refused as refused:
            raise CommandError(refused.detail) from None

    def _list(self) -> None:
        policies = Policy.objects.select_related("project")
        if not policies:
            self.stdout.write("There is no policy: prorl servers register URL POLICY")
        for policy in policies:
            self.stdout.write(f"{policy.name}  version {policy.version}  project {policy.project.name}")

    def _versions(self, policy: Policy, options: dict[str, Any]) -> None:
        for version in versions_of(policy)[:20]:
            self._say(version)

    def _announce(self, policy: Policy, options: dict[str, Any]) -> None:
        source: dict[str, Any] = {"kind": "external"}
        if options["lora"]:
            source = {"kind": "lora", "name": options["lora"], "path": options["path"]}
        elif options["path"]:
            source = {"kind": "path", "path": options["path"]}
        announced = announce_version(policy=policy, version=options["version"], mode=options["mode"], source=source)
        while not options["no_wait"] and announced.state in (PolicyVersion.State.ANNOUNCED, PolicyVersion.State.LOADING):
            time.sleep(_LOOK_SECONDS)
            announced.refresh_from_db()
        self._say(announced)
        if announced.state == PolicyVersion.State.FAILED:
            raise CommandError(f"No server has version {announced.version}.")

    def _loaded(self, policy: Policy, options: dict[str, Any]) -> None:
        found = versions_of(policy).filter(version=options["version"]).first()
        if found is None:
            raise CommandError(f"Version {options['version']} of {policy.name} was not announced.")
        self._say(note_weights_in_place(announcement=found, failed={}))

    def _say(self, version: PolicyVersion) -> None:
        source = " ".join(version.source[part] for part in ("kind", "name", "path") if part in version.source)
        self.stdout.write(f"version {version.version}  {version.state}  {version.mode}  {source}")
        urls = {str(pk): url for pk, url in LLMServer.objects.filter(pk__in=list(version.report)).values_list("pk", "url")}
        for server_id, entry in version.report.items():  # of a server that was removed since, the id is left
            self.stdout.write(f"  {urls.get(server_id, server_id)}  {entry['state']}  {entry.get('error', '')}".rstrip())


def _find(name: str) -> Policy:
    """By its name, which may need the project's before it: PROJECT/NAME."""
    project, _, own = name.rpartition("/")
    found = list(Policy.objects.filter(name=own, **({"project__name": project} if project else {})))
    if len(found) != 1:
        what = "There is no policy" if not found else "Several projects have a policy"
        raise CommandError(f"{what} {name!r}. Name one as PROJECT/POLICY; `prorl policies list` shows them.")
    return found[0]
