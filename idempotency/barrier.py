"""Try / confirm / cancel that may arrive twice, in any order, or not at all.

The barrier of a TCC participant: idempotence, empty rollback (cancel without try succeeds and does
nothing) and anti-suspension (a try that arrives after its cancel is refused, every time: the marker
stays). The check and the business writes are one transaction.

Source: Apache Seata, "TCC fence"; Hmily; dtm, "sub-transaction barrier".
"""

from __future__ import annotations

from django.db import IntegrityError, connections, transaction

from . import db, keys
from .conf import conf
from .exceptions import BarrierRefused, ConfigurationError
from .models import Branch, BranchStatus


def tried(transaction_id: str, branch: str, *, using: str | None = None) -> bool:
    """Whether to reserve now. False: this try was done before.

    Call it in the transaction that reserves. Raises BarrierRefused after a cancel.
    """
    alias = _alias(using)
    if _insert(alias, transaction_id, branch, BranchStatus.TRIED):
        return True
    status = _status(alias, transaction_id, branch)
    if status in (BranchStatus.CANCELLED, BranchStatus.SUSPENDED):
        raise BarrierRefused(f"branch {branch!r} of transaction {transaction_id!r} was cancelled")
    return False


def confirmed(transaction_id: str, branch: str, *, using: str | None = None) -> bool:
    """Whether to make the reservation final now. False: it was confirmed before.

    Call it in the transaction that confirms. Raises BarrierRefused without a try, or after a cancel.
    """
    alias = _alias(using)
    if _change(alias, transaction_id, branch, BranchStatus.CONFIRMED):
        return True
    status = _status(alias, transaction_id, branch)
    if status == BranchStatus.CONFIRMED:
        return False
    raise BarrierRefused(
        f"branch {branch!r} of transaction {transaction_id!r} is {status or 'untried'}; only a tried one can be "
        "confirmed"
    )


def cancelled(transaction_id: str, branch: str, *, using: str | None = None) -> bool:
    """Whether to release the reservation now. False: there is none, or it was released before.

    Call it in the transaction that releases. Without a try it leaves a marker that refuses the try
    when it comes late. Raises BarrierRefused after a confirm.
    """
    alias = _alias(using)
    while True:
        if _change(alias, transaction_id, branch, BranchStatus.CANCELLED):
            return True
        if _insert(alias, transaction_id, branch, BranchStatus.SUSPENDED):
            return False
        status = _status(alias, transaction_id, branch)
        if status == BranchStatus.CONFIRMED:
            raise BarrierRefused(
                f"branch {branch!r} of transaction {transaction_id!r} is confirmed; undo it as a new operation"
            )
        if status != BranchStatus.TRIED:  # else: its try committed between our two statements
            return False


def _alias(using: str | None) -> str:
    alias = using or conf.USING
    if not connections[alias].in_atomic_block:
        raise ConfigurationError(
            "The barrier protects nothing outside a transaction: call it inside transaction.atomic(), "
            "together with the writes it decides about."
        )
    return alias


def _insert(alias: str, transaction_id: str, branch: str, status: BranchStatus) -> bool:
    """Insert the branch; waits for a rival that has not committed yet."""
    try:
        with transaction.atomic(alias):
            Branch.objects.using(alias).create(
                id=_pk(transaction_id, branch),
                transaction=transaction_id,
                name=branch,
                status=status,
                created_at=db.now(alias),
                changed_at=db.now(alias),
            )
    except IntegrityError:
        return False
    return True


def _change(alias: str, transaction_id: str, branch: str, status: BranchStatus) -> bool:
    row = Branch.objects.using(alias).filter(
        pk=_pk(transaction_id, branch), status=BranchStatus.TRIED
    )
    return row.update(status=status, changed_at=db.now(alias)) == 1


def _status(alias: str, transaction_id: str, branch: str) -> str | None:
    # A locking read: a plain one may show an old snapshot under REPEATABLE READ.
    rows = Branch.objects.using(alias).select_for_update().filter(pk=_pk(transaction_id, branch))
    return rows.values_list("status", flat=True).first()


def _pk(transaction_id: str, branch: str) -> object:
    return keys.operation_id(("tcc", transaction_id), branch)
