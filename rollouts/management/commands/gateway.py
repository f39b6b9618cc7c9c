"""`manage.py gateway`: one process of the gateway for agents outside any sandbox."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from prorl_site.garbage import collect_rarely
from rollouts.engine.errors import StoreFailed


class Command(BaseCommand):
    help = "Serve the model URL of sessions until SIGTERM."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="Address to listen on (default 127.0.0.1).")
        parser.add_argument(
            "--port", type=int, default=settings.GATEWAY_PORT, help="Port to listen on (default PRORL_GATEWAY_PORT)."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        from rollouts.worker.gateway_process import GatewayProcess

        collect_rarely()
        process = GatewayProcess(node=settings.NODE, host=options["host"], port=options["port"])
        try:
            asyncio.run(process.run())
        except StoreFailed as error:
            raise CommandError(f"The database does not answer: {error}") from error
