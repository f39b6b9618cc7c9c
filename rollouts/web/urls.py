"""The dashboard's URLs."""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path
from django.views.generic import RedirectView

from .views import downloads, home, images, nodes, policies, queue, rollout, rollouts, runs, servers, webhooks

urlpatterns = [
    path("", home.overview, name="home"),
    path("favicon.ico", RedirectView.as_view(url=f"{settings.STATIC_URL}web/icon.svg")),
    path("login/", LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("runs/<uuid:run_id>/", runs.detail, name="run"),
    path("runs/<uuid:run_id>/live/", runs.live, name="run-live"),
    path("runs/<uuid:run_id>/cancel/", runs.cancel, name="run-cancel"),
    path("runs/<uuid:run_id>/rollouts/", rollouts.of_run, name="run-rollouts"),
    path("rollouts/", rollouts.listing, name="rollouts"),
    path("rollouts/<uuid:rollout_id>/", rollout.detail, name="rollout"),
    path("rollouts/<uuid:rollout_id>/live/", rollout.live, name="rollout-live"),
    path("rollouts/<uuid:rollout_id>/cancel/", rollout.cancel, name="rollout-cancel"),
    path("rollouts/<uuid:rollout_id>/reward/", rollout.reward, name="rollout-reward"),
    path("rollouts/<uuid:rollout_id>/rescore/", rollout.rescore, name="rollout-rescore"),
    path("rollouts/<uuid:rollout_id>/tokens/", rollout.tokens, name="rollout-tokens"),
    path("rollouts/<uuid:rollout_id>/events/", rollout.events, name="rollout-events"),
    path("rollouts/<uuid:rollout_id>/attempts/", rollout.attempts, name="rollout-attempts"),
    path("rollouts/<uuid:rollout_id>/raw/", rollout.raw, name="rollout-raw"),
    path("rollouts/<uuid:rollout_id>/rollout.json", downloads.rollout_json, name="rollout-json"),
    path(
        "rollouts/<uuid:rollout_id>/turns/<int:turn>/calls/<int:index>/output.txt",
        downloads.tool_output,
        name="rollout-tool-output",
    ),
    path(
        "rollouts/<uuid:rollout_id>/turns/<int:turn>/calls/<int:index>/pictures/<int:picture>",
        downloads.tool_picture,
        name="rollout-tool-picture",
    ),
    path("rollouts/<uuid:rollout_id>/pictures/<slug:sha256>", downloads.picture, name="rollout-picture"),
    path("queue/", queue.detail, name="queue"),
    path("queue/live/", queue.live, name="queue-live"),
    path("policies/", policies.listing, name="policies"),
    path("policies/<uuid:policy_id>/", policies.detail, name="policy"),
    path("policies/<uuid:policy_id>/live/", policies.live, name="policy-live"),
    path("servers/", servers.listing, name="servers"),
    path("servers/live/", servers.live, name="servers-live"),
    path("servers/<uuid:server_id>/<slug:name>/", servers.act, name="server-act"),
    path("nodes/", nodes.listing, name="nodes"),
    path("nodes/live/", nodes.live, name="nodes-live"),
    path("nodes/<str:name>/drain/", nodes.drain, name="node-drain"),
    path("nodes/<str:name>/resume/", nodes.resume, name="node-resume"),
    path("images/", images.listing, name="images"),
    path("images-live/", images.listing_live, name="images-live"),
    path("images/<str:name>/", images.detail, name="image"),
    path("images/<str:name>/live/", images.live, name="image-live"),
    path("images/<str:name>/build/", images.build, name="image-build"),
    path("images/<str:name>/cancel/", images.cancel, name="image-cancel"),
    path("webhooks/", webhooks.listing, name="webhooks"),
    path("webhooks/<uuid:endpoint_id>/", webhooks.detail, name="webhook"),
    path("webhooks/<uuid:endpoint_id>/replay/", webhooks.replay_failed, name="webhook-replay-failed"),
    path("webhooks/<uuid:endpoint_id>/deliveries/<uuid:delivery_id>/replay/", webhooks.replay, name="webhook-replay"),
]
