from django.urls import include, path, re_path
from drf_spectacular.views import SpectacularAPIView, SpectacularRedocView

from rollouts.api.errors import no_such_path
from rollouts.api.views import (
    datasets,
    environments,
    events,
    llm_servers,
    projects,
    rescorings,
    results,
    rollouts,
    runs,
    webhooks,
)

v1 = [
    path("project/", projects.ProjectDetail.as_view()),
    path("environments/", environments.EnvironmentList.as_view()),
    path("environments/<uuid:id>/", environments.EnvironmentDetail.as_view()),
    path("datasets/", datasets.DatasetList.as_view()),
    path("datasets/<uuid:id>/", datasets.DatasetDetail.as_view()),
    path("datasets/<uuid:id>/tasks/", datasets.TaskList.as_view()),
    path("policies/", environments.PolicyList.as_view()),
    path("llm-servers/", llm_servers.LLMServerList.as_view()),
    path("llm-servers/<uuid:id>/", llm_servers.LLMServerDetail.as_view()),
    path("runs/", runs.RunList.as_view()),
    path("runs/<uuid:id>/", runs.RunDetail.as_view()),
    path("runs/<uuid:id>/cancel/", runs.RunCancel.as_view()),
    path("runs/<uuid:id>/groups/", runs.GroupList.as_view()),
    path("runs/<uuid:id>/results/", results.RunResults.as_view()),
    path("runs/<uuid:id>/rescore/", rescorings.RunRescore.as_view()),
    path("runs/<uuid:id>/rescorings/", rescorings.RunRescorings.as_view()),
    path("runs/<uuid:id>/events/stream/", events.RunStream.as_view()),
    path("groups/<uuid:id>/", runs.GroupDetail.as_view()),
    path("groups/<uuid:id>/cancel/", runs.GroupCancel.as_view()),
    path("rollouts/", rollouts.RolloutList.as_view()),
    path("rollouts/<uuid:id>/", rollouts.RolloutDetail.as_view()),
    path("rollouts/<uuid:id>/cancel/", rollouts.RolloutCancel.as_view()),
    path("rollouts/<uuid:id>/trajectory/", rollouts.RolloutTrajectory.as_view()),
    path("rollouts/<uuid:id>/events/", rollouts.RolloutEvents.as_view()),
    path("rollouts/<uuid:id>/events/stream/", events.RolloutStream.as_view()),
    path("rollouts/<uuid:id>/rewards/", rollouts.RolloutRewards.as_view()),
    path("rollouts/<uuid:id>/attempts/", rollouts.RolloutAttempts.as_view()),
    path("rollouts/<uuid:id>/rescore/", rescorings.RolloutRescore.as_view()),
    path("rollouts/<uuid:id>/rescorings/", rescorings.RolloutRescorings.as_view()),
    path("webhooks/", webhooks.WebhookList.as_view()),
    path("webhooks/<uuid:id>/", webhooks.WebhookDetail.as_view()),
    path("webhooks/<uuid:id>/rotate/", webhooks.WebhookRotate.as_view()),
    path("webhooks/<uuid:id>/replay/", webhooks.WebhookReplay.as_view()),
    path("webhooks/<uuid:id>/deliveries/", webhooks.DeliveryList.as_view()),
    path("webhooks/<uuid:id>/deliveries/<uuid:delivery>/", webhooks.DeliveryDetail.as_view()),
    path("webhooks/<uuid:id>/deliveries/<uuid:delivery>/replay/", webhooks.DeliveryReplay.as_view()),
]

urlpatterns = [
    path("v1/", include(v1)),
    path("schema/", SpectacularAPIView.as_view(), name="api-schema"),
    path("docs/", SpectacularRedocView.as_view(url_name="api-schema", template_name="api/docs.html"), name="api-docs"),
    re_path("", no_such_path),
]
