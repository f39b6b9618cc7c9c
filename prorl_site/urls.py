from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/", include("rollouts.api.urls")),
    path("", include("rollouts.web.urls")),
]

# Problem+json below /api/, Django's pages elsewhere.
handler400 = "rollouts.api.errors.handler400"
handler500 = "rollouts.api.errors.handler500"
