"""The Django project: settings, URLs, the Celery application and the command line."""
