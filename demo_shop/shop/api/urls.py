from django.urls import include, path
from rest_framework.routers import DefaultRouter

from idempotency.contrib.rest_framework import OperationStatusView

from . import views

router = DefaultRouter(use_regex_path=False)
router.register("products", views.ProductViewSet, "product")
router.register("addresses", views.AddressViewSet, "address")
router.register("orders", views.OrderViewSet, "order")

urlpatterns = [
    path("", include(router.urls)),
    path("checkout/", views.CheckoutView.as_view(), name="checkout"),
    path(
        "unprotected/checkout/",
        views.UnprotectedCheckoutView.as_view(),
        name="unprotected-checkout",
    ),
    path(
        "operations/<str:operation>/",
        OperationStatusView.as_view(show_result=True),
        name="operation-status",
    ),
    path("counters/", views.CountersView.as_view(), name="counters"),
]
