"""Rows that tests count. The app has no migrations: the test runner creates its tables."""

from django.db import models


class Effect(models.Model):
    """One visible effect of a handler. A test that expects one effect counts one row."""

    label = models.CharField(max_length=200)
    amount = models.IntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.label} ({self.amount})"
