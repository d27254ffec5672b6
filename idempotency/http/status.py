"""What became of an operation, for the caller whose it is: a status URL for clients and support.

    path("operations/<str:operation>/", OperationStatusView.as_view(), name="operation-status")

With IDEMPOTENCY["STATUS_ROUTE"] = "operation-status", refusals name that URL too.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from math import ceil
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import BooleanField, ExpressionWrapper, Q
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _
from django.views import View

from .. import db, encoding, keys, scopes
from ..conf import conf
from ..exceptions import AnonymousKey, InvalidKey
from ..functions import FAILURE
from ..models import Operation, Status
from ..policies import Policy
from .problems import status_url

#: What a client shows: (title, message) by message key.
MESSAGES: dict[str, tuple[Promise, Promise]] = {
    "processing": (_("Processing"), _("Your request is being processed.")),
    "interrupted": (_("Interrupted"), _("Your request was not finished. Send it again: nothing is done twice.")),
    "succeeded": (_("Done"), _("Your request was completed.")),
    "failed": (_("Failed"), _("Your request failed. You can try again.")),
    "requires_action": (_("Your turn"), _("Something is needed from you to go on.")),
    "reconciling": (_("Checking"), _("We are checking what became of your request. Please do not retry.")),
    "reversed": (_("Reversed"), _("Your request was undone.")),
}  # fmt: skip

#: Longest Retry-After, in seconds, of an operation whose outcome is not known.
LONGEST_WAIT = 60


def find(request: Any, identifier: str, policy: Policy) -> Operation | None:
    """The caller's own operation with this key or id; None for everybody else's, and for none.

    Without an identifier the key is the one in the request's header. The scope is the policy's, as
    where the operation was made.
    """
    resolved = policy.resolved()
    try:
        scope = resolved.scope(request)
        key = identifier or keys.parse(request.headers.get(conf.KEY_HEADER, ""))
    except (AnonymousKey, InvalidKey):
        return None
    ids = [keys.operation_id(scope, key)]
    with suppress(ValueError):
        ids.append(uuid.UUID(key))
    using = resolved.using
    is_leased = ExpressionWrapper(
        Q(lease_expires_at__gt=db.now(using)), output_field=BooleanField()
    )
    found = (
        Operation.objects.using(using)
        .filter(pk__in=ids, scope=scopes.encode(scope))
        .annotate(is_leased=is_leased, clock=db.now(using))
    )
    # A key that happens to be the id of another operation names the one it is the key of.
    return min(found, key=lambda operation: ids.index(operation.pk), default=None)


def describe(operation: Operation, policy: Policy, *, show_result: bool) -> dict[str, Any]:
    """The JSON members for an operation that `find` found."""
    name = message_key(operation)
    title, message = MESSAGES[name]
    action = key_action(operation)
    stored = operation.outcome()
    headers = {header.lower(): value for header, value in stored.headers.items()}
    references = operation.references.using(operation.using).exclude(name="provider")
    members: dict[str, Any] = {
        "operation_id": str(operation.pk),
        "operation": operation.name,
        "status": operation.status,
        "message_key": f"operation.{name}",
        "title": str(title),
        "message": str(message),
        "safe_to_retry": action in ("same_key", "new_key"),
        "key_action": action,
        "response_code": operation.code,
        "resource": headers.get("location") or headers.get("content-location"),
        "references": [
            {"name": name, "value": value}
            for name, value in references.order_by("id").values_list("name", "value")
        ],
        "created_at": operation.created_at,
        "finished_at": operation.finished_at,
        "replays_until": operation.expires_at,
    }
    if show_result:
        members["result"] = _result(operation, policy)
    return members


def message_key(operation: Operation) -> str:
    return "interrupted" if _is_interrupted(operation) else operation.status


def key_action(operation: Operation) -> str | None:
    """What a retry would need: `same_key`, `new_key`, `wait` (none, now), or None (there is no need)."""
    if _is_interrupted(operation):
        return "same_key"
    if operation.status in (Status.PROCESSING, Status.RECONCILING):
        return "wait"
    has_failed = FAILURE in operation.outcome().headers or (operation.code or 200) >= 400
    is_undone = operation.status == Status.REVERSED and has_failed
    return "new_key" if operation.status == Status.FAILED or is_undone else None


def retry_after(operation: Operation) -> int | None:
    """Seconds until another look is worth it; None when nothing will change by itself."""
    if key_action(operation) != "wait":
        return None
    if operation.status == Status.PROCESSING:
        return int(conf.RETRY_AFTER)
    clock = getattr(operation, "clock", operation.due_at)
    return max(
        int(conf.RETRY_AFTER), min(ceil((operation.due_at - clock).total_seconds()), LONGEST_WAIT)
    )


def _is_interrupted(operation: Operation) -> bool:
    """Nobody is executing it, and nobody will unless its client comes back."""
    return (
        operation.status == Status.PROCESSING
        and operation.arguments is None  # else the completer goes on with it
        and not getattr(operation, "is_leased", False)
        and bool(operation.stepwise or operation.last_error)
    )


def _result(operation: Operation, policy: Policy) -> Any:
    stored = operation.outcome()
    codec = policy.resolved().codec
    if stored.body is None or not operation.is_final:
        return None
    try:
        body = stored.body if codec is None else codec.decode(stored.body)
        return encoding.loads(body) if stored.code is None else json.loads(body)
    except Exception:  # not JSON, or no longer readable: the state is still worth an answer
        return None


class OperationStatusView(View):
    """GET: the state of the caller's own operation, by key or id; a constant 404 for anything else.

    Members: `status`, `message_key` with a translated `title` and `message`, `safe_to_retry` and
    `key_action` (a client offers a retry only if that is true), `resource` (the stored Location),
    `references`, times. `Retry-After` while something may still change by itself.

    `policy` gives scope, database and codec, as where the operations were made. With `show_result` the
    stored JSON is shown too: to the owner, but without the permission checks that its own view makes.
    """

    http_method_names = ["get", "head", "options"]
    policy = Policy()
    show_result = False

    def get(self, request: HttpRequest, operation: str = "") -> HttpResponse:
        found = find(request, operation, self.policy)
        if found is None:
            return not_found()
        members = describe(found, self.policy, show_result=self.show_result)
        return answer(members, retry_after(found))


def not_found() -> HttpResponse:
    members = {"type": "about:blank", "title": "Not Found", "status": 404}
    response = HttpResponse(
        json.dumps(members), status=404, content_type="application/problem+json"
    )
    response["Cache-Control"] = "no-store"
    return response


def answer(members: dict[str, Any], wait: int | None, status: int = 200) -> HttpResponse:
    response = JsonResponse(members, status=status, encoder=DjangoJSONEncoder)
    response["Cache-Control"] = "no-store"
    if wait is not None:
        response["Retry-After"] = str(wait)
    return response


def accepted(operation_id: uuid.UUID) -> HttpResponse:
    """202: the work goes on in this operation; `Location` is its status URL (needs STATUS_ROUTE)."""
    url = status_url(operation_id)
    members = {"operation_id": str(operation_id), "status": Status.PROCESSING, "status_url": url}
    response = answer(members, int(conf.RETRY_AFTER), status=202)
    if url:
        response["Location"] = url
    return response
