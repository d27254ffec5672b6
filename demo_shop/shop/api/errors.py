"""The shop's refusals as HTTP answers. All are final: the same key gets the same answer again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rest_framework import status
from rest_framework.exceptions import APIException

from demo_shop.shop.exceptions import PaymentRefused, ShopError


class Refused(APIException):
    status_code = status.HTTP_409_CONFLICT
    default_code = "refused"


class PaymentRequired(Refused):
    status_code = status.HTTP_402_PAYMENT_REQUIRED
    default_code = "payment_refused"


@contextmanager
def refusals() -> Iterator[None]:
    """Turn a ShopError raised inside into the matching API exception."""
    try:
        yield
    except PaymentRefused as error:
        raise PaymentRequired(str(error)) from error
    except ShopError as error:
        raise Refused(str(error)) from error
