"""The `prorl` command. `prorl --help` lists what there is."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated
from uuid import UUID

import typer

from prorl_site.embedded.supervisor import SupervisorError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="ProRL Site: rollout-as-a-service."
)


@app.command()
def up() -> None:
    """Run the whole platform on this machine until Ctrl-C."""
    from prorl_site.local import platform

    begun = time.monotonic()

    def say(line: str) -> None:
        typer.echo(f"{time.monotonic() - begun:6.1f} s  {line}")

    with platform(say) as running:
        say(f"dashboard {running.url}/  admin {running.url}/admin/  log in as {running.login} with password {running.password}")
        running.supervisor.wait()


@app.command()
def demo(leave: bool = typer.Option(False, "--exit", help="Stop when the job is done instead of staying up.")) -> None:
    """Run the main job on this machine: real model, real sandboxes, a run of groups, results."""
    from prorl_site.demo.main import demo as run_demo

    raise typer.Exit(run_demo(stay=not leave))


@app.command()
def gateway(
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: Annotated[int | None, typer.Option(help="Port to listen on (PRORL_GATEWAY_PORT).")] = None,
) -> None:
    """Serve the model URL of agents outside any sandbox until SIGTERM."""
    _manage("gateway", "--host", host, *(["--port", str(port)] if port is not None else []))


@app.command()
def prune(dry_run: bool = typer.Option(False, "--dry-run", help="Only say how much would go.")) -> None:
    """Remove now what is older than its project keeps it, and blobs that nothing refers to."""
    _manage("prune", *(["--dry-run"] if dry_run else []))


@app.command()
def doctor(as_json: bool = typer.Option(False, "--json", help="One JSON object instead of lines for people.")) -> None:
    """Check everything the platform stands on, and say what to do. Exit code 1: something fails."""
    _manage("doctor", *(["--json"] if as_json else []), checks=False)  # it reports them itself


@app.command()
def rescore(
    id: Annotated[UUID, typer.Argument(help="Of a run or a rollout.")],
    environment: str = typer.Option("", help="NAME@VERSION to score with instead of each rollout's own."),
    only_cause: str = typer.Option("", help="Of a run: only rollouts that ended by this cause."),
) -> None:
    """Score finished rollouts again; the old rewards are kept."""
    _manage("rescore", str(id), "--environment", environment, *(["--only-cause", only_cause] if only_cause else []))


@app.command("check-tokens")
def check_tokens(run: Annotated[UUID | None, typer.Argument(help="Default: all that is stored.")] = None) -> None:
    """Prove that the stored trajectories are what was sent and sampled. Exit code 1: some are not."""
    _manage("check_tokens", *(["--run", str(run)] if run else ["--all"]))


nodes = typer.Typer(no_args_is_help=True, help="Worker hosts: list them, drain one, let it take part again.")
app.add_typer(nodes, name="nodes")


@nodes.command("list")
def list_nodes() -> None:
    """All nodes with their state, and what they hold of what they may hold."""
    _manage("nodes", "list")


@nodes.command("drain")
def drain_node(
    name: str,
    seconds: Annotated[float | None, typer.Option(help="What it holds may finish in this time.")] = None,
) -> None:
    """Start nothing on a node any more. What does not finish in time is handed back and runs elsewhere."""
    _manage("nodes", "drain", name, *(["--seconds", str(seconds)] if seconds is not None else []))


@nodes.command("resume")
def resume_node(name: str) -> None:
    """Let a draining node take part again."""
    _manage("nodes", "resume", name)


servers = typer.Typer(no_args_is_help=True, help="LLM servers: register, list, drain, pause, resume, probe, remove.")
app.add_typer(servers, name="servers")


@servers.command("list")
def list_servers() -> None:
    """All LLM servers with their state and the rollouts that run on them."""
    _manage("servers", "list")


@servers.command("register")
def register_server(
    url: Annotated[str, typer.Argument(help="Root of the server, without /v1.")],
    policy: Annotated[str, typer.Argument(help="Made when there is none of that name.")],
    project: str = typer.Option("", help="May be left out when there is only one."),
    model: str = typer.Option("", help="May be left out when the server serves only one."),
    policy_version: int = typer.Option(0, help="Of the weights that it serves."),
    capacity: int = typer.Option(64, help="Rollouts it takes at once."),
    tokenizer: str = typer.Option("", help="Directory of the model's tokenizer files on the workers."),
    tool_format: str = typer.Option("", help="How the model writes calls: hermes (default), qwen3_coder, llama3_json."),
    max_model_len: Annotated[int | None, typer.Option(help="Its context in tokens, where it does not tell.")] = None,
    allow_text_only: bool = typer.Option(False, "--allow-text-only", help="Also when training cannot use it."),
) -> None:
    """Probe an LLM server and let it serve a policy. One that needs a key is registered through the API or the admin."""
    options: dict[str, object] = {"--project": project, "--model": model, "--tokenizer": tokenizer}
    options |= {"--tool-format": tool_format, "--max-model-len": max_model_len}
    options |= {"--policy-version": policy_version, "--capacity": capacity}
    given = [part for name, value in options.items() if value not in ("", None) for part in (name, str(value))]
    _manage("servers", "register", url, policy, *given, *(["--allow-text-only"] if allow_text_only else []))


def _act_on_server(action: str, explanation: str) -> None:
    def act(server: Annotated[str, typer.Argument(help="Its URL or id.")]) -> None:
        _manage("servers", action, server)

    servers.command(action, help=explanation)(act)


_act_on_server("drain", "Let a server keep its rollouts and get no new ones.")
_act_on_server("pause", "Let a server take no calls: turns go to another one of its policy, or wait.")
_act_on_server("probe", "Look at a server now.")
_act_on_server("remove", "Forget a server. Rollouts on it go on at another one.")


@servers.command("resume")
def resume_server(
    server: Annotated[str, typer.Argument(help="Its URL or id.")],
    policy_version: Annotated[
        int | None, typer.Option(help="Of the weights that it has now; needed after an update failed on it.")
    ] = None,
) -> None:
    """Let a server take part again."""
    _manage("servers", "resume", server, *(["--policy-version", str(policy_version)] if policy_version is not None else []))


policies = typer.Typer(no_args_is_help=True, help="Policies: list them and their versions, announce new weights.")
app.add_typer(policies, name="policies")


@policies.command("list")
def list_policies() -> None:
    """All policies with their versions."""
    _manage("policies", "list")


@policies.command("versions")
def list_versions(policy: Annotated[str, typer.Argument(help="NAME or PROJECT/NAME.")]) -> None:
    """The newest announcements, and what became of them on each server."""
    _manage("policies", "versions", policy)


@policies.command("announce")
def announce_version(
    policy: Annotated[str, typer.Argument(help="NAME or PROJECT/NAME.")],
    version: Annotated[int, typer.Argument(help="Higher than all before.")],
    path: str = typer.Option("", help="A checkpoint that all servers can read; without it you put the weights in place."),
    lora: str = typer.Option("", help="The path is a LoRA adapter, asked for by this name."),
    mode: str = typer.Option("drain", help="Replies under way: drain, continue or abort."),
    no_wait: bool = typer.Option(False, "--no-wait", help="Only announce it."),
) -> None:
    """Have all servers of a policy load new weights. Exit code 1: none did."""
    given = [part for name, value in (("--path", path), ("--lora", lora)) if value for part in (name, value)]
    _manage("policies", "announce", policy, str(version), "--mode", mode, *given, *(["--no-wait"] if no_wait else []))


@policies.command("loaded")
def weights_in_place(policy: str, version: int) -> None:
    """Say that weights which you put in place yourself are there."""
    _manage("policies", "loaded", policy, str(version))


sessions = typer.Typer(no_args_is_help=True, help="Sessions of agents outside any sandbox: list, show, close, cancel.")
app.add_typer(sessions, name="sessions")


@sessions.command("list")
def list_sessions(
    project: str = typer.Option("", help="Only this project's."),
    state: str = typer.Option("", help="Only those in this state of rollouts; running: open."),
    limit: int = typer.Option(50, help="How many, newest first."),
) -> None:
    """Sessions with their state, calls, and when their agents were last seen."""
    _manage("sessions", "list", f"--project={project}", f"--state={state}", f"--limit={limit}")


@sessions.command("show")
def show_session(session: Annotated[UUID, typer.Argument(help="Its id.")]) -> None:
    """All about a session but its key, which nobody can read."""
    _manage("sessions", "show", str(session))


@sessions.command("close")
def close_session(
    session: Annotated[UUID, typer.Argument(help="Its id.")],
    outcome: str = typer.Option("completed", help="completed, max_turns, failed or abandoned."),
    reward: Annotated[float | None, typer.Option(help="What it is worth; else its environment scores it, if it can.")] = None,
    detail: str = typer.Option("", help="A sentence about it."),
) -> None:
    """End a session as whoever runs its agent would."""
    given = [f"--reward={reward}"] if reward is not None else []
    _manage("sessions", "close", str(session), f"--outcome={outcome}", f"--detail={detail}", *given)


@sessions.command("cancel")
def cancel_session(session: Annotated[UUID, typer.Argument(help="Its id.")]) -> None:
    """Cancel a session: its agent's calls are refused."""
    _manage("sessions", "cancel", str(session))


images = typer.Typer(no_args_is_help=True, help="Images that sandboxes start from: register, build, list, verify, prune.")
app.add_typer(images, name="images")


@images.command("register")
def register_image(
    name: str,
    kind: Annotated[str, typer.Argument(help="docker_archive, oci, sif, definition, tarball, debian, python or virtualenv.")],
    source: Annotated[str, typer.Argument(help='Its settings as JSON, such as {"suite": "bookworm"}.')],
    format: str = typer.Option("directory", help="In which form it is kept: directory or sif."),
) -> None:
    """Register an image; `prorl images build` makes it."""
    _manage("images", "register", name, kind, source, "--format", format)


@images.command("build")
def build_image(
    name: str,
    force: bool = typer.Option(False, "--force", help="Also when nothing has changed since it was built."),
    here: bool = typer.Option(False, "--here", help="In this process, without a maintenance worker."),
    no_wait: bool = typer.Option(False, "--no-wait", help="Only ask for it."),
) -> None:
    """Build an image and follow its log. Exit code 1: it failed."""
    flags = {"--force": force, "--here": here, "--no-wait": no_wait}
    _manage("images", "build", name, *(flag for flag, given in flags.items() if given))


@images.command("cancel")
def cancel_image_build(name: str) -> None:
    """Cancel the build of an image."""
    _manage("images", "cancel", name)


@images.command("list")
def list_images() -> None:
    """All images with their state, size and last use."""
    _manage("images", "list")


@images.command("verify")
def verify_images(
    names: Annotated[list[str] | None, typer.Argument(help="All that are ready, if none is named.")] = None,
) -> None:
    """Read images again and start a sandbox of each. Exit code 1: one is not as it was built, or does not start."""
    _manage("images", "verify", *(names or []))


@images.command("prune")
def prune_images(
    unused_days: Annotated[float | None, typer.Option(help="Those unused for so long (PRORL_IMAGE_KEEP_DAYS).")] = None,
    max_gb: Annotated[float | None, typer.Option(help="The longest unused, until the rest fits (PRORL_IMAGE_MAX_GB).")] = None,
    dry_run: bool = typer.Option(False, "--dry-run", help="Only say what would go."),
) -> None:
    """Remove images that nothing needs; they can be built again."""
    options = ["--unused-days", str(unused_days)] if unused_days is not None else []
    options += ["--max-gb", str(max_gb)] if max_gb is not None else []
    _manage("images", "prune", *options, *(["--dry-run"] if dry_run else []))


def _manage(command: str, *arguments: str, checks: bool = True) -> None:
    """Run a management command; what it refuses is said without a traceback, with exit code 1."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "prorl_site.settings")
    import django
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import CommandError, call_command
    from django.db import OperationalError

    try:
        django.setup()
        call_command(command, *arguments, **({"skip_checks": False} if checks else {}))
    except (CommandError, ImproperlyConfigured, OperationalError) as error:
        typer.echo(f"prorl: {error}", err=True)
        raise typer.Exit(1) from None


def main() -> None:
    """Entry point; what a person can do something about is said without a traceback."""
    try:
        app()
    except SupervisorError as error:
        typer.echo(f"prorl: {error}", err=True)
        sys.exit(1)
