"""The floor: the same protocol written by hand into one view, with none of the package's code.

It checks the key, hashes the request, claims, locks, runs the effect and stores the response in
the package's own table; it knows no policies, other databases, failures or rare cases.
"""

import hashlib
import hmac
import json
import re
import uuid

from django.conf import settings
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse

from .views import create

SECRET = hmac.digest(settings.SECRET_KEY.encode(), b"benchmark", "sha256")
KEY = re.compile(r"[\x21-\x7e]{1,255}")

CLAIM = """
    INSERT INTO idempotency_operation
        (id, scope, key, name, status, fingerprint, attempt, owner, stepwise, created_at, due_at)
    VALUES (%s, %s, %s, 'floor', 'processing', %s, 1, %s, false, now(), now() + interval '1 day')
    ON CONFLICT (id) DO NOTHING
"""
READ = "SELECT status, fingerprint, code, headers, body FROM idempotency_operation WHERE id = %s"
LOCK = "SELECT status FROM idempotency_operation WHERE id = %s FOR NO KEY UPDATE NOWAIT"
COMPLETE = """
    UPDATE idempotency_operation
    SET status = 'succeeded', code = %s, headers = %s, body = %s, finished_at = now(),
        expires_at = now() + interval '1 day', tombstone_until = now() + interval '1 day',
        due_at = now() + interval '1 day'
    WHERE id = %s
"""


def create_floor(request: HttpRequest) -> HttpResponse:
    key = request.headers.get("Idempotency-Key", "")
    if not KEY.fullmatch(key):
        return JsonResponse({"type": "invalid-key"}, status=400)
    scope = f"user:{request.user.pk}"
    pk = uuid.UUID(bytes=hashlib.sha256(f"{len(scope)}:{scope}{key}".encode()).digest()[:16])
    asked = f"{request.method} {request.path}\n".encode() + request.body
    fingerprint = hmac.digest(SECRET, asked, "sha256").hex()
    with connection.cursor() as cursor:
        cursor.execute(CLAIM, (pk, scope, key, fingerprint, uuid.uuid4().hex))
        if not cursor.rowcount:
            cursor.execute(READ, (pk,))
            status, stored, code, headers, body = cursor.fetchone()
            if stored != fingerprint:
                return JsonResponse({"type": "mismatch"}, status=422)
            if status == "succeeded":
                return HttpResponse(bytes(body), status=code, headers=json.loads(headers))
        with transaction.atomic():
            cursor.execute(LOCK, (pk,))
            if cursor.fetchone() != ("processing",):
                return JsonResponse({"type": "in-progress"}, status=409)
            response = create(request)
            headers = json.dumps({"Content-Type": response["Content-Type"]})
            cursor.execute(COMPLETE, (response.status_code, headers, response.content, pk))
    return response
