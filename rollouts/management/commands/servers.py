"""`manage.py servers list|register|drain|pause|resume|probe|remove`: LLM servers."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rollouts.llm.capabilities import Feature
from rollouts.models import LLMServer, Project
from rollouts.selectors.server_rows import fleets, policies_of
from rollouts.services.errors import Refused
from rollouts.services.server_health import probe_servers
from rollouts.services.servers import ServerChanges, change_server, register_server, remove_server

_STATES = {"drain": "draining", "pause": "paused", "resume": "live"}


class Command(BaseCommand):
    help = "List LLM servers, register one, drain, pause, resume, probe or remove one."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list")
        register = actions.add_parser("register")
        register.add_argument("url", help="Root of the server, without /v1.")
        register.add_argument("policy")
        register.add_argument("--project", default="", help="May be left out when there is only one.")
        register.add_argument("--model", default="", help="May be left out when the server serves only one.")
        register.add_argument("--policy-version", type=int, default=0)
        register.add_argument("--capacity", type=int, default=64, help="Rollouts it takes at once.")
        register.add_argument("--tokenizer", default="", help="Directory of the model's tokenizer files.")
        register.add_argument("--tool-format", default="")
        register.add_argument("--max-model-len", type=int)
        register.add_argument("--allow-text-only", action="store_true")
        for action in (*_STATES, "probe", "remove"):
            parts = actions.add_parser(action)
            parts.add_argument("server", help="Its URL or id.")
            if action == "resume":
                parts.add_argument("--policy-version", type=int, help="Of the weights that it has now.")

    def handle(self, *args: Any, **options: Any) -> None:
        action = options["action"]
        try:
            if action == "list":
                self._list()
            elif action == "register":
                self._register(options)
            else:
                self._change(action, _find(options["server"]), options.get("policy_version"))
        except Refused as refused:
            more = [f"{e.pointer.lstrip('/')}: {e.detail}" for e in refused.errors if e.detail not in refused.detail]
            raise CommandError(" ".join([refused.detail, *more])) from None

    def _list(self) -> None:
        rows = [(row, fleet.policy.name) for fleet in fleets(policies_of(Project.objects.all())) for row in fleet.rows]
        if not rows:
            self.stdout.write("No LLM server is registered: prorl servers register URL POLICY")
            return
        wide = max(len("server"), *(len(row.server.url) for row, _ in rows))
        self.stdout.write(f"{'server':{wide}}  {'state':10}  {'rollouts':>9}  version  policy")
        for row, policy in rows:
            server, use = row.server, f"{row.in_flight}/{row.server.capacity}"
            can = "  takes pictures" if _takes_pictures(server) else ""
            self.stdout.write(f"{server.url:{wide}}  {server.state:10}  {use:>9}  {server.policy_version:>7}  {policy}{can}")
            if server.last_error:
                self.stdout.write(f"{'':{wide}}  {server.last_error}")

    def _register(self, options: dict[str, Any]) -> None:
        names = ("url", "policy", "model", "policy_version", "capacity", "tokenizer", "tool_format", "max_model_len")
        known = {name: options[name] for name in (*names, "allow_text_only")}
        server = register_server(project=_project(options["project"]), **known)
        can = " It takes pictures." if _takes_pictures(server) else ""
        self.stdout.write(f"{server} serves {server.policy.name} with room for {server.capacity} rollouts.{can}")

    def _change(self, action: str, server: LLMServer, policy_version: int | None) -> None:
        if action == "remove":
            remove_server(server=server)
            self.stdout.write(f"{server.url} is removed.")
            return
        if action == "probe":
            probe_servers([server])
        else:
            change_server(server=server, changes=ServerChanges(state=_STATES[action], policy_version=policy_version))
        server.refresh_from_db()
        self.stdout.write(" ".join(filter(None, (f"{server.url}: {server.state}.", server.last_error))))


def _takes_pictures(server: LLMServer) -> bool:
    return Feature.PICTURES in server.capabilities.get("features", ())


def _find(name: str) -> LLMServer:
    servers = list(LLMServer.objects.select_related("policy"))
    found = [server for server in servers if name.rstrip("/") in (server.url, str(server.pk))]
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"{name} is registered {len(found)} times; name one by its id: {_names(found)}")
    raise CommandError(f"There is no server {name!r}. Registered: {_names(servers) or 'none'}.")


def _names(servers: list[LLMServer]) -> str:
    return ", ".join(f"{server.url} ({server.pk})" for server in servers)


def _project(name: str) -> Project:
    projects = list(Project.objects.filter(name=name) if name else Project.objects.all())
    if len(projects) == 1:
        return projects[0]
    known = ", ".join(Project.objects.values_list("name", flat=True)) or "none"
    raise CommandError(f"Name the project with --project. There are: {known}.")
