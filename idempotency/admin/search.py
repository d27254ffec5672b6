"""From what somebody pasted to operations, through one index at a time."""

from __future__ import annotations

import re
import uuid

from django.db.models import QuerySet

from .. import keys
from ..conf import conf
from ..exceptions import InvalidKey
from ..models import Operation, Reference

UUID = re.compile(r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}", re.IGNORECASE)
#: The most operations that one reference may lead to.
MOST = 1000


def find(operations: QuerySet[Operation], pasted: str) -> QuerySet[Operation]:
    """The operations that `pasted` names; none if nothing does.

    Tried in turn: a key (bare, quoted, or a whole header line), an operation's id (also inside a
    problem document or a URL), a reference's value or `name:value`. Each is one look-up in one
    index; a term that is several of these is the first.
    """
    using = operations.db
    key = _key(pasted)
    if key and Operation.objects.using(using).filter(key=key).exists():
        return operations.filter(key=key)
    for found in UUID.findall(pasted):
        pk = uuid.UUID(found)
        if Operation.objects.using(using).filter(pk=pk).exists():
            return operations.filter(pk=pk)
    references = Reference.objects.using(using)
    name, _, value = pasted.strip().partition(":")
    for match in ({"value": pasted.strip()}, {"value": value.strip(), "name": name.strip()}):
        if match["value"]:
            match["value"] = Reference.shortened(match["value"])
            ids = references.filter(**match).values_list("operation_id", flat=True)[:MOST]
            if found := list(ids):
                return operations.filter(pk__in=found)
    return operations.none()


def _key(pasted: str) -> str:
    """The key in a pasted header line, header value or bare key."""
    names = "|".join({re.escape(conf.KEY_HEADER), "idempotency-key"})
    value = re.sub(rf"\s*(?:{names})\s*:\s*", "", pasted, count=1, flags=re.IGNORECASE).strip()
    try:
        return keys.parse(value)
    except InvalidKey:
        return value if len(value) <= keys.MAX_LENGTH else ""
