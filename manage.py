#!/usr/bin/env python3
"""Django's command line: `manage.py help` lists what there is."""

import os
import secrets
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "prorl_site.settings")
    if sys.argv[1:2] == ["sandbox_selfcheck"]:
        # It examines a host on which nothing may be set up yet, and keeps no secrets.
        os.environ.setdefault("PRORL_SECRET_KEY", secrets.token_hex())
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(f"manage.py: {error}")


if __name__ == "__main__":
    main()
