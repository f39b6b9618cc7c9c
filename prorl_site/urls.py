from django.contrib import admin
from django.urls import include, path

from prorl_site.health import livez, readyz
from prorl_site.metrics import metrics

urlpatterns = [
    path("livez", livez),
    path("readyz", readyz),
    path("metrics", metrics),
    path("admin/", admin.site.urls),
    path("api/", include("rollouts.api.urls")),
    path("", include("rollouts.web.urls")),
]

# Problem+json below /api/, Django's pages elsewhere.
handler400 = "rollouts.api.errors.handler400"
handler500 = "rollouts.api.errors.handler500"
