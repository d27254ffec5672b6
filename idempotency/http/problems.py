"""Refusals as RFC 9457 problem details."""

from __future__ import annotations

import json
import uuid
from typing import Any

from django.http import HttpResponse
from django.urls import reverse

from ..conf import conf
from ..exceptions import Refusal


def problem(refusal: Refusal, request: Any = None) -> HttpResponse:
    """The response for a refusal: `application/problem+json`, never cached, never stored.

    A project replaces the rendering with IDEMPOTENCY["PROBLEM_RENDERER"], a
    callable(request, refusal) -> HttpResponse or None (None: this one). `request` is Django's, or
    REST framework's inside its views. The headers are added to its response too.
    """
    response: HttpResponse | None = None
    if conf.PROBLEM_RENDERER is not None:
        response = conf.PROBLEM_RENDERER(request, refusal)
    if response is None:
        response = HttpResponse(
            json.dumps(members(refusal)),
            status=refusal.status,
            content_type="application/problem+json",
        )
    response.headers.setdefault("Cache-Control", "no-store")
    if refusal.retry_after is not None:
        response.headers.setdefault("Retry-After", str(refusal.retry_after))
    if conf.DOCUMENTATION_URL:
        link = f'<{conf.DOCUMENTATION_URL}#{refusal.code}>; rel="describedby"; type="text/html"'
        response.headers.setdefault("Link", link)
    return response


def members(refusal: Refusal) -> dict[str, Any]:
    """The members of the problem object; clients branch on `type`, never on the status alone."""
    result: dict[str, Any] = {
        "type": f"{conf.PROBLEM_TYPE}{refusal.code}",
        "title": str(refusal.title),
        "status": refusal.status,
    }
    if refusal.detail:
        result["detail"] = str(refusal.detail)
    result["retryable"] = refusal.retryable
    result["key_action"] = refusal.key_action
    if refusal.operation_id is not None:
        result["operation_id"] = str(refusal.operation_id)
        url = status_url(refusal.operation_id)
        if url is not None:
            result["status_url"] = url
    return result


def status_url(operation_id: uuid.UUID) -> str | None:
    """Where the state of the operation can be read: IDEMPOTENCY["STATUS_ROUTE"] with its id."""
    if not conf.STATUS_ROUTE:
        return None
    return reverse(conf.STATUS_ROUTE, args=[str(operation_id)])
