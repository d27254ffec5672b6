"""A small real shop that shows one intent, one outcome. Start it with `python -m demo_shop`."""

from .celery import app as celery_app

__all__ = ["celery_app"]
