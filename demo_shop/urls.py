from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import include, path

from demo_shop.provider.views import bank
from demo_shop.shop.webhooks import PaymentWebhook


def health(request: HttpRequest) -> HttpResponse:
    """Says that a worker process answers."""
    return HttpResponse("ok", content_type="text/plain")


urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/", include("demo_shop.shop.api.urls")),
    path("api-auth/", include("rest_framework.urls")),
    path("health/", health),
    path("webhooks/payments/", PaymentWebhook.as_view(), name="payment-webhook"),
    path("bank/<uuid:pk>/", bank, name="bank"),
    path("", include("demo_shop.shop.urls")),
]
