from django.apps import AppConfig


class ProviderConfig(AppConfig):
    name = "demo_shop.provider"
    label = "provider"
    verbose_name = "Fake payment provider"
    default_auto_field = "django.db.models.BigAutoField"
