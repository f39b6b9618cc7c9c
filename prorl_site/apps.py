from django.apps import AppConfig


class SiteConfig(AppConfig):
    """Gives the project system checks and commands of its own."""

    name = "prorl_site"

    def ready(self) -> None:
        from prorl_site import checks  # noqa: F401 - registers them
