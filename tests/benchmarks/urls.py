"""Routes of the measured project."""

from django.urls import path

from .floor import create_floor
from .views import (
    EffectViewSet,
    ProtectedEffectViewSet,
    create,
    create_atomic,
    create_protected,
    ready,
)

urlpatterns = [
    path("ready", ready),
    path("unprotected", create),
    path("atomic", create_atomic),
    path("protected", create_protected),
    path("floor", create_floor),
    path("drf", EffectViewSet.as_view({"post": "create"})),
    path("drf-protected", ProtectedEffectViewSet.as_view({"post": "create"})),
]
