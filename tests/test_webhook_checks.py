"""System checks of webhook views: each with a set-up that passes and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from django.db import connections
from django.urls import path

from idempotency import checks
from idempotency.checks import urls
from idempotency.policies import Policy
from idempotency.webhooks import (
    Delivery,
    HmacVerifier,
    StandardWebhooksVerifier,
    StripeVerifier,
    WebhookView,
    github,
    shopify,
)
from tests.senders import KEY, Hook
from tests.test_checks import ids


class Sound(Hook):
    """Nothing is wrong with it."""


@Sound.handles()
def handle(delivery: Delivery) -> None: ...


class Bare(WebhookView):
    """Nothing is set."""


GENERIC = HmacVerifier("s", header="X-Sig")


@pytest.fixture
def check(settings: Any) -> Callable[..., list[str]]:
    """The ids of what is wrong with these views in a URLconf."""

    def found(*views: Any) -> list[str]:
        module = ModuleType("urlconf")
        module.urlpatterns = [  # type: ignore[attr-defined]
            path(f"{number}/", view) for number, view in enumerate(views)
        ]
        settings.ROOT_URLCONF = module
        return sorted(ids([*checks.check_webhooks(), *checks.check_urls()]))

    return found


@pytest.mark.parametrize(
    "verify", [StandardWebhooksVerifier(KEY), StripeVerifier("s"), github("s"), shopify("s")]
)
def test_a_source_and_a_verifier_of_the_package_are_enough(
    check: Callable[..., list[str]], verify: Any
) -> None:
    assert check(Sound.as_view(verify=verify), Sound.as_view(acknowledge_first=True)) == []


def test_a_view_that_says_nothing_is_told_everything_once(check: Callable[..., list[str]]) -> None:
    assert check(Bare.as_view(), Bare.as_view()) == ["E090", "E091", "E092", "W094"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"source": ""}, ["E090"]),
        ({"verify": lambda body: None, "delivery_id": "body"}, ["E091"]),
        ({"verify": lambda body, headers: None, "delivery_id": "body"}, []),
        ({"verify": GENERIC}, ["E092"]),
        ({"verify": GENERIC, "delivery_id": "header:X-Id"}, []),
        ({"verify": GENERIC, "delivery_id": "form:id", "event_type": "form:type"}, []),
        ({"verify": GENERIC, "delivery_id": lambda delivery: delivery.payload["id"]}, []),
        ({"verify": GENERIC, "delivery_id": lambda body, headers: "id"}, ["E092"]),
        ({"delivery_id": "X-Id"}, ["E092"]),
        ({"event_type": "body"}, ["E092"]),
        ({"retry_horizon": 7 * 86400}, []),
        ({"retry_horizon": 7 * 86400 + 1}, ["W093"]),
    ],
)
def test_what_cannot_work_is_found(
    check: Callable[..., list[str]], options: dict[str, Any], expected: list[str]
) -> None:
    assert check(Sound.as_view(**options)) == expected


def test_hooks_may_say_where_the_id_is(check: Callable[..., list[str]]) -> None:
    class Overridden(Sound):
        verify = GENERIC

        def get_delivery_id(self, delivery: Delivery) -> str:
            return str(delivery.payload["id"])

    assert check(Overridden.as_view()) == []


@pytest.mark.parametrize(
    ("policy", "horizon", "expected"),
    [
        (Policy(retention=24 * 3600), 75 * 3600, ["W093"]),
        (Policy(retention=76 * 3600), 75 * 3600, []),
        (Policy(retention=60), None, []),
        (Policy(retention=60, tombstone=76 * 3600), 75 * 3600, []),
        (Policy(exclude_fields=["x"]), 75 * 3600, []),
        (Policy(), 8 * 86400, ["W093"]),
    ],
)
def test_deliveries_must_be_remembered_longer_than_they_are_repeated(
    check: Callable[..., list[str]], policy: Policy, horizon: float | None, expected: list[str]
) -> None:
    """BUGS P16, L08, RULES 115."""
    view = type("View", (Sound,), {"policy": policy, "retry_horizon": horizon})
    assert check(view.as_view()) == expected


def test_a_relay_must_be_able_to_import_the_view(check: Callable[..., list[str]]) -> None:
    class Local(Sound):
        acknowledge_first = True

    assert check(Local.as_view()) == ["E095"]
    assert check(Local.as_view(acknowledge_first=False)) == []


def test_a_view_inside_atomic_requests_is_found(
    check: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    view = Sound.as_view()
    assert check(view) == []

    def loses_attributes(request: Any) -> Any:
        return view(request)

    loses_attributes.idempotency_policy = view.idempotency_policy  # type: ignore[attr-defined]
    assert check(loses_attributes) == ["W081"]


def test_a_webhook_is_no_unprotected_url(check: Callable[..., list[str]]) -> None:
    check(Sound.as_view())
    assert list(urls.unprotected()) == []


def test_broken_settings_do_not_break_the_check(
    check: Callable[..., list[str]], settings: Any
) -> None:
    settings.IDEMPOTENCY = {"SCOPE": "nowhere.scope"}
    assert check(Bare.as_view()) == []
