"""The admin site: where environments, LLM servers and keys are registered."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.admin.apps import AdminConfig


class ProrlAdminSite(admin.AdminSite):
    """Stock Django admin under our name."""

    site_header = "ProRL Site administration"
    site_title = "ProRL Site"
    index_title = "Registry"
    site_url = "/"


class ProrlAdminConfig(AdminConfig):
    """Makes `ProrlAdminSite` the default site."""

    default_site = "prorl_site.admin.ProrlAdminSite"
