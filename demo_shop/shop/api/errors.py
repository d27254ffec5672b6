"""The shop's refusals as HTTP answers. All are final: the same key gets the same answer again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rest_framework import status
from rest_framework.exceptions import APIException

from demo_shop.shop.exceptions import PaymentRefused, ShopError
from idempotency.exceptions import StoredFailure


class Refused(APIException):
    status_code = status.HTTP_409_CONFLICT
    default_code = "refused"


class PaymentRequired(Refused):
    status_code = status.HTTP_402_PAYMENT_REQUIRED
    default_code = "payment_refused"


class NoAnswer(APIException):
    """The unprotected till knows no better: it says that something went wrong."""

    status_code = status.HTTP_504_GATEWAY_TIMEOUT
    default_code = "no_answer"
    default_detail = "The payment provider does not answer."


@contextmanager
def refusals() -> Iterator[None]:
    """Turn a ShopError raised inside, now or at an earlier try, into the matching API exception."""
    try:
        yield
    except StoredFailure as failure:
        is_payment = failure.error_type.endswith(f".{PaymentRefused.__qualname__}")
        raise (PaymentRequired if is_payment else Refused)(str(failure)) from failure
    except PaymentRefused as error:
        raise PaymentRequired(str(error)) from error
    except ShopError as error:
        raise Refused(str(error)) from error
