"""All settings, read from `PRORL_*` environment variables. `.env.example` lists them with their defaults."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from prorl_site import env, logs
from sandboxes.options import NodeOptions

VAR_DIR = env.var_dir()
env.load_file(VAR_DIR / "prorl.env")

DEBUG = env.boolean("PRORL_DEBUG", False)
SECRET_KEY = env.text("PRORL_SECRET_KEY", "development only" if DEBUG else "")
if not SECRET_KEY:
    raise ImproperlyConfigured(
        "PRORL_SECRET_KEY is not set. `prorl up` makes one; elsewhere set PRORL_SECRET_KEY or PRORL_SECRET_KEY_FILE."
    )
ALLOWED_HOSTS = env.words("PRORL_ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
CSRF_TRUSTED_ORIGINS = env.words("PRORL_CSRF_TRUSTED_ORIGINS", "")

INSTALLED_APPS = [
    "prorl_site",
    "prorl_site.admin.ProrlAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.postgres",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_htmx",
    "rollouts",
    "sandboxes",
]

MIDDLEWARE = [
    "prorl_site.request_log.request_log_middleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "prorl_site.middleware.ContentSecurityPolicyMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "prorl_site.urls"
ASGI_APPLICATION = "prorl_site.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# --- Database: one short-lived borrowing of a pooled connection per unit of work -------------------------------------------
DB_POOL_SIZE = env.integer("PRORL_DB_POOL_SIZE", 10)
_database: dict[str, Any] = dict(dj_database_url.parse(env.text("PRORL_DATABASE_URL", "postgres:///prorl"), conn_max_age=0))
if _database["ENGINE"] != "django.db.backends.postgresql":
    raise ImproperlyConfigured("PRORL_DATABASE_URL must be a postgres:// URL.")
# None (no prepared statements) is for connection poolers that cannot keep them; see rollouts/prepared.py.
_database.setdefault("OPTIONS", {})["prepare_threshold"] = 5 if env.boolean("PRORL_DB_PREPARE", True) else None
if DB_POOL_SIZE:
    # The pool doubles its pauses between attempts to reconnect until it gives up and the next caller begins anew: bounded to a
    # few seconds, since by default a database that was away for a minute is missed for another one, longer than any lease.
    _pool = {"min_size": 1, "max_size": DB_POOL_SIZE, "timeout": 10, "reconnect_timeout": 4}
    _database.setdefault("OPTIONS", {})["pool"] = _pool
DATABASES = {"default": _database}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "/login/"

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-us"
USE_I18N = False

STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True  # serves the wheels' and our own files without a collectstatic step
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    "blobs": {
        "BACKEND": env.text("PRORL_BLOB_BACKEND", "rollouts.storage.DurableFileStorage"),
        "OPTIONS": env.json_object("PRORL_BLOB_OPTIONS")
        or {
            "location": env.text("PRORL_BLOB_DIR", str(VAR_DIR / "blobs")),
            "file_permissions_mode": 0o600,
            "directory_permissions_mode": 0o700,
        },
    },
}
KEEP_RECORDS_DAYS = env.integer("PRORL_KEEP_RECORDS_DAYS", 30, minimum=1)  # stopped sandboxes, ended worker processes, webhooks
BLOB_THRESHOLD = env.integer("PRORL_BLOB_THRESHOLD", 64 * 1024, minimum=1024)  # bytes; what is larger leaves its row

# --- HTTP API ----------------------------------------------------------------------------------------------------------------
DATA_UPLOAD_MAX_MEMORY_SIZE = env.integer("PRORL_MAX_BODY_BYTES", 16 * 1024 * 1024)
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "rollouts.api.auth.ApiKeyAuthentication",
        "rollouts.api.auth.ProjectSessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rollouts.api.auth.HasScope"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_PAGINATION_CLASS": "rollouts.api.pagination.KeysetPagination",
    "EXCEPTION_HANDLER": "rollouts.api.errors.problem_response",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "ProRL Site",
    "DESCRIPTION": "Rollout-as-a-service for reinforcement learning of multi-turn LLM agents.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_AUTHENTICATION": [],  # a description of the API tells nothing about anybody
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
}

# --- Message broker ----------------------------------------------------------------------------------------------------------
BROKER_URL = env.text("PRORL_BROKER_URL")  # amqp://…; empty: files under var/, for one machine
BROKER_DIR = VAR_DIR / "broker"
RABBITMQ_MANAGEMENT_URL = env.text("PRORL_RABBITMQ_MANAGEMENT_URL")  # only `prorl doctor` asks it

# --- Execution ---------------------------------------------------------------------------------------------------------------
NODE = env.text("PRORL_NODE", socket.gethostname().partition(".")[0])
SANDBOX_BACKEND = env.text("PRORL_SANDBOX_BACKEND", "bubblewrap")
SANDBOX_DIR = Path(env.text("PRORL_SANDBOX_DIR", str(VAR_DIR / "sandboxes")))
SANDBOX_WARM = env.integer("PRORL_SANDBOX_WARM", 0, minimum=0)  # started in advance on each node, of the host's own system
SANDBOX_OPTIONS = NodeOptions(
    apptainer=env.text("PRORL_APPTAINER"),
    apptainer_instances=env.boolean("PRORL_APPTAINER_INSTANCES", False),
    full_network=env.boolean("PRORL_SANDBOX_FULL_NETWORK", False),
    starts=env.integer("PRORL_SANDBOX_STARTS", 4, minimum=1),
    starts_per_image=env.integer("PRORL_SANDBOX_STARTS_PER_IMAGE", 2, minimum=1),
)
IMAGE_DIR = Path(env.text("PRORL_IMAGE_DIR", str(VAR_DIR / "images")))  # of all nodes
IMAGE_KEEP_DAYS = env.number("PRORL_IMAGE_KEEP_DAYS", 0)  # unused images are pruned after that; 0: never
IMAGE_MAX_GB = env.number("PRORL_IMAGE_MAX_GB", 0)  # of all images together; 0: no limit
LEASE_SECONDS = env.number("PRORL_LEASE_SECONDS", 30, minimum=1)
# A process that falls silent in the middle of a transaction must not hold its locks for longer than its lease: the rescuer, and
# with it the rollouts of everybody else, would wait for it. What the URL says wins.
_database["OPTIONS"]["options"] = (
    f"-c idle_in_transaction_session_timeout={LEASE_SECONDS * 1000:.0f} {_database['OPTIONS'].get('options', '')}".rstrip()
)
HEARTBEAT_SECONDS = env.number("PRORL_HEARTBEAT_SECONDS", min(1.0, LEASE_SECONDS / 3), minimum=0.1)
DISPATCH_SECONDS = env.number("PRORL_DISPATCH_SECONDS", 1.0, minimum=0.05)  # the longest sleep; commits wake it earlier
DISPATCH_MIN_SECONDS = env.number("PRORL_DISPATCH_MIN_SECONDS", 0.025, minimum=0)  # from one round to the next
HINT_TIMEOUT_SECONDS = env.number("PRORL_HINT_TIMEOUT_SECONDS", 20, minimum=1)  # a hint nobody took is published again
READY_BUFFER = env.integer("PRORL_READY_BUFFER", 16, minimum=1)  # prewarmed rollouts kept for the RUN workers of a node
NODE_GONE_SECONDS = env.number("PRORL_NODE_GONE_SECONDS", 86_400, minimum=60)  # a silent node's sandboxes are given up
DRAIN_SECONDS = env.number("PRORL_DRAIN_SECONDS", 60, minimum=0)  # what a draining worker or node may still finish in
PROBE_SECONDS = env.number("PRORL_PROBE_SECONDS", 5, minimum=0.2)  # between health probes of an LLM server
SLOW_START_SECONDS = env.number("PRORL_SLOW_START_SECONDS", 30, minimum=0)  # a new or recovered LLM server is filled slowly
SERVER_WAIT_SECONDS = env.number("PRORL_SERVER_WAIT_SECONDS", 60, minimum=0)  # a turn waits for a dead LLM server to come back
WEIGHT_UPDATE_SECONDS = env.number("PRORL_WEIGHT_UPDATE_SECONDS", 1800, minimum=1)  # after that an update has failed

# --- Agents outside any sandbox ----------------------------------------------------------------------------------------------
GATEWAY_PORT = env.integer("PRORL_GATEWAY_PORT", 8100, minimum=1)  # where `prorl gateway` listens
GATEWAY_URL = env.text("PRORL_GATEWAY_URL", f"http://127.0.0.1:{GATEWAY_PORT}")  # where agents find it

# --- Webhooks ----------------------------------------------------------------------------------------------------------------
WEBHOOK_ALLOW_PRIVATE = env.boolean("PRORL_WEBHOOK_ALLOW_PRIVATE", True)  # trainers of a cluster have private addresses
WEBHOOK_RETRY_SECONDS = env.numbers("PRORL_WEBHOOK_RETRY_SECONDS", "5,300,1800,7200,18000,36000,36000")
WEBHOOK_DISABLE_DAYS = env.number("PRORL_WEBHOOK_DISABLE_DAYS", 5)  # of nothing but failures
WEBHOOK_POLL_SECONDS = env.number("PRORL_WEBHOOK_POLL_SECONDS", 0.5, minimum=0.02)

# --- Observation -------------------------------------------------------------------------------------------------------------
LOG_LEVEL = env.text("PRORL_LOG_LEVEL", "INFO")
LOG_FORMAT = env.text("PRORL_LOG_FORMAT", "auto")
if LOG_FORMAT not in logs.FORMATS:
    raise ImproperlyConfigured(f"PRORL_LOG_FORMAT={LOG_FORMAT} is none of {', '.join(logs.FORMATS)}.")
LOGGING_CONFIG = "prorl_site.logs.configure"
LOGGING = logs.settings(level=LOG_LEVEL, format=LOG_FORMAT)
# Who may read /metrics: everyone, who sends the token, or (neither is set) this host.
METRICS_PUBLIC = env.boolean("PRORL_METRICS_PUBLIC", False)
METRICS_TOKEN = env.text("PRORL_METRICS_TOKEN")
OTEL_ENDPOINT = env.text("PRORL_OTEL_ENDPOINT")  # http://collector:4318/v1/traces; needs the extra `otel`
