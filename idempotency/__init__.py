"""Idempotent views, functions, tasks and messages for Django: one user intent, one durable outcome."""

__version__ = "0.1.0"
