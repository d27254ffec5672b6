"""Try / confirm / cancel that may arrive twice, in any order, or not at all.

The barrier of a TCC participant: idempotence, empty rollback (cancel without try succeeds and does
nothing) and anti-suspension (a try that arrives after its cancel is refused, every time: the marker
stays). The check and the business writes are one transaction.

Source: Apache Seata, "TCC fence"; Hmily; dtm, "sub-transaction barrier".
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from django.db import connections

from . import db, keys
from .conf import conf
from .exceptions import BarrierRefused, ConfigurationError
from .models import Branch, BranchStatus


def tried(transaction_id: str, branch: str, *, using: str | None = None) -> bool:
    """Whether to reserve now. False: this try was done before.

    Call it in the transaction that reserves. Raises BarrierRefused after a cancel.
    """
    at = _place(transaction_id, branch, using)
    is_new, status = db.visit_branch(*at, BranchStatus.TRIED)
    if status in (BranchStatus.CANCELLED, BranchStatus.SUSPENDED):
        raise BarrierRefused(f"branch {branch!r} of transaction {transaction_id!r} was cancelled")
    return is_new


def confirmed(transaction_id: str, branch: str, *, using: str | None = None) -> bool:
    """Whether to make the reservation final now. False: it was confirmed before.

    Call it in the transaction that confirms. Raises BarrierRefused without a try, or after a cancel.
    """
    at = _place(transaction_id, branch, using)
    if _change(at, BranchStatus.CONFIRMED):
        return True
    # A locking read: a plain one may show an old snapshot under REPEATABLE READ.
    rows = Branch.objects.using(at.using).select_for_update().filter(pk=at.pk)
    status = rows.values_list("status", flat=True).first()
    if status == BranchStatus.CONFIRMED:
        return False
    raise BarrierRefused(
        f"branch {branch!r} of transaction {transaction_id!r} is {status or 'untried'}; only a tried one "
        "can be confirmed"
    )


def cancelled(transaction_id: str, branch: str, *, using: str | None = None) -> bool:
    """Whether to release the reservation now. False: there is none, or it was released before.

    Call it in the transaction that releases. Without a try it leaves a marker that refuses the try
    when it comes late. Raises BarrierRefused after a confirm.
    """
    at = _place(transaction_id, branch, using)
    _, status = db.visit_branch(*at, BranchStatus.SUSPENDED)  # waits for a try that is under way
    if status == BranchStatus.CONFIRMED:
        raise BarrierRefused(
            f"branch {branch!r} of transaction {transaction_id!r} is confirmed; undo it as a new operation"
        )
    return status == BranchStatus.TRIED and _change(at, BranchStatus.CANCELLED)


class _Place(NamedTuple):
    using: str
    pk: uuid.UUID
    transaction: str
    name: str


def _place(transaction_id: str, branch: str, using: str | None) -> _Place:
    alias = using or conf.USING
    if not connections[alias].in_atomic_block:
        raise ConfigurationError(
            "The barrier protects nothing outside a transaction: call it inside transaction.atomic(), "
            "together with the writes it decides about."
        )
    for text in (transaction_id, branch):
        if not 1 <= len(text) <= 255:
            raise ConfigurationError(
                "A transaction and a branch are named by strings of 1 to 255 characters."
            )
    return _Place(alias, keys.operation_id(("tcc", transaction_id), branch), transaction_id, branch)


def _change(at: _Place, status: BranchStatus) -> bool:
    row = Branch.objects.using(at.using).filter(pk=at.pk, status=BranchStatus.TRIED)
    return row.update(status=status, changed_at=db.now(at.using)) == 1
