"""Scopes: who shares a key space."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.urls import ResolverMatch
from django.utils.functional import SimpleLazyObject
from hypothesis import example, given
from hypothesis import strategies as st
from rest_framework.views import APIView

from idempotency import scopes
from idempotency.exceptions import AnonymousKey, ConfigurationError


class TokenUser:
    """What stateless token authentication makes from claims: no database row."""

    is_authenticated = True

    def __init__(self, username: str = "", **attributes: object) -> None:
        self.username = username
        self.__dict__.update(attributes)

    def get_username(self) -> str:
        return self.username


def request_of(user: object = None, **attributes: object) -> Any:
    return SimpleNamespace(user=user, **attributes)


any_scope = st.lists(
    st.text(st.sampled_from("a:|\\ué\x00\ud800 ") | st.characters(), max_size=5),
    min_size=1,
    max_size=4,
).map(tuple)


@given(any_scope, any_scope)
@example(("a", "b"), ("a|b",))
@example(("a\\", "b"), ("a\\|b",))
@example(("",), ("", ""))
@example(("\x00",), ("\\u0000",))
def test_two_scopes_never_share_their_stored_form(
    scope: tuple[str, ...], other: tuple[str, ...]
) -> None:
    """RULES 24: ("a", "bc") is not ("ab", "c")."""
    assert (scopes.encode(scope) == scopes.encode(other)) is (scope == other)


@given(any_scope)
def test_every_database_can_store_an_encoded_scope(scope: tuple[str, ...]) -> None:
    """RULES 17: PostgreSQL refuses NUL, and no encoding has lone surrogates."""
    encoded = scopes.encode(scope)
    assert "\x00" not in encoded
    encoded.encode()


def test_encoded_scopes_are_readable() -> None:
    assert scopes.encode(("tenant:acme", "user:42")) == "tenant:acme|user:42"


@pytest.mark.parametrize(
    "scope", [(), "user:42", ["user:42"], (42,), ("user:42", None), None, ("x" * 256,)]
)
def test_what_is_no_scope_is_a_configuration_error(scope: Any) -> None:
    """RULES 23: a scope callable that returns nothing must not become a shared key space."""
    with pytest.raises(ConfigurationError):
        scopes.encode(scope)


def test_principals_are_kept_apart_by_primary_key() -> None:
    """BUGS D01, D02, D10."""
    assert scopes.principal(request_of(User(pk=1, username="a"))) == ("user:1",)
    assert scopes.principal(request_of(User(pk=2, username="a"))) == ("user:2",)


def test_the_principal_survives_token_rotation_session_login_and_renaming() -> None:
    """RULES 25."""
    by_session = SimpleLazyObject(lambda: User(pk=7, username="before"))
    by_rotated_token = User(pk=7, username="after")
    by_stateless_token = TokenUser("before", id=7, pk=7)
    named = {
        scopes.principal(request_of(user, auth=token, session=SimpleNamespace(session_key=token)))
        for user, token in ((by_session, "s"), (by_rotated_token, "t"), (by_stateless_token, "j"))
    }
    assert named == {("user:7",)}


def test_the_principal_of_a_drf_request_is_the_authenticated_one() -> None:
    class Authentication:
        def authenticate(self, request: Any) -> tuple[object, None]:
            return User(pk=3), None

    http = RequestFactory().post("/")
    http.user = AnonymousUser()  # type: ignore[assignment]
    request = APIView(authentication_classes=[Authentication]).initialize_request(http)
    assert scopes.principal(request) == ("user:3",)


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        (TokenUser("ann", pk=0), "user:0"),
        (TokenUser("ann", id="2f9c"), "user:2f9c"),
        (TokenUser("ann", pk=None, id=None), "username:ann"),
        (TokenUser("ann", pk=""), "username:ann"),
        (TokenUser("42"), "username:42"),
        (TokenUser("ann", pk=5, _meta={"collection": "user"}), "user:5"),  # as document stores do
        (SimpleNamespace(is_authenticated=True, username="ann"), "username:ann"),
    ],
)
def test_callers_without_a_database_row_are_named_by_their_claims(
    user: object, expected: str
) -> None:
    """The user name "42" is not user 42."""
    assert scopes.principal(request_of(user)) == (expected,)


def test_another_model_with_the_same_primary_key_is_another_principal() -> None:
    """An API client authenticated as 42 must not see the responses of user 42."""
    client = Group(pk=42)
    client.is_authenticated = True  # type: ignore[attr-defined]
    assert scopes.principal(request_of(client)) == ("auth.group:42",)


def test_a_proxy_of_the_user_model_is_the_same_principal() -> None:
    class Staff(User):
        class Meta:
            app_label = "auth"
            proxy = True

    assert scopes.principal(request_of(Staff(pk=42))) == ("user:42",)


@pytest.mark.parametrize(
    "request_",
    [
        request_of(AnonymousUser()),
        request_of(None),
        SimpleNamespace(),
        request_of(TokenUser("")),
        request_of(SimpleNamespace(is_authenticated=True)),
    ],
)
def test_nobody_shares_a_key_space_by_being_anonymous(request_: Any) -> None:
    """RULES 23, BUGS D04."""
    with pytest.raises(AnonymousKey):
        scopes.principal(request_)


def test_the_scope_ignores_what_the_client_sends() -> None:
    """BUGS D05, RULES 21."""
    named = set()
    for address in ("1.2.3.4", "5.6.7.8"):
        http = RequestFactory().post(
            "/", headers={"X-Forwarded-For": address, "X-Tenant": address}, REMOTE_ADDR=address
        )
        http.user = User(pk=1)
        named.add(scopes.principal(http))
    assert named == {("user:1",)}


def test_very_long_names_are_hashed_so_that_they_fit() -> None:
    first, second = (
        scopes.principal(request_of(TokenUser("n" * 500 + last))) for last in ("1", "2")
    )
    assert first != second
    assert scopes.encode(first).startswith("username-sha256:")
    assert len(scopes.encode(first)) <= scopes.MAX_LENGTH


# Sessions


@pytest.fixture
def cache_sessions(settings: Any) -> None:
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.cache"
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


def browse(view: Any, cookie: str | None = None) -> HttpResponse:
    http = RequestFactory().post("/")
    if cookie is not None:
        http.COOKIES["sessionid"] = cookie
    return SessionMiddleware(view)(http)  # type: ignore[return-value]


def show_scope(request: HttpRequest) -> HttpResponse:
    return HttpResponse(scopes.encode(scopes.session(request)))


@pytest.mark.usefixtures("cache_sessions")
def test_a_session_is_created_and_is_the_same_scope_on_the_retry() -> None:
    first = browse(show_scope)
    cookie = first.cookies["sessionid"].value
    assert browse(show_scope, cookie).content == first.content


@pytest.mark.usefixtures("cache_sessions")
def test_two_visitors_have_two_session_scopes() -> None:
    """BUGS D04, D05: also behind one address."""
    assert browse(show_scope).content != browse(show_scope).content


@pytest.mark.usefixtures("cache_sessions")
def test_the_session_id_is_a_credential_and_is_not_in_the_scope() -> None:
    first = browse(show_scope)
    assert first.cookies["sessionid"].value not in first.content.decode()


@pytest.mark.usefixtures("cache_sessions")
def test_a_session_id_made_up_by_the_client_is_not_used() -> None:
    """RULES 21: never client input."""
    made_up = "a" * 32
    first, second = browse(show_scope, made_up), browse(show_scope, made_up)
    assert first.content != second.content
    assert first.cookies["sessionid"].value != made_up


def test_signed_cookie_sessions_have_no_stable_id(settings: Any) -> None:
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
    with pytest.raises(ConfigurationError, match="server-side sessions"):
        browse(show_scope)


def test_session_scope_without_session_middleware_says_so() -> None:
    with pytest.raises(ConfigurationError, match="SessionMiddleware"):
        scopes.session(RequestFactory().post("/"))


# Composition


def test_the_anonymous_key_space_is_explicit_and_meets_no_other() -> None:
    assert scopes.anonymous(request_of()) == ("anonymous",)
    assert scopes.principal(request_of(TokenUser("anonymous"))) != ("anonymous",)


def test_tenants_are_apart_and_no_tenant_is_none_of_them() -> None:
    """BUGS D03, D11; RULES 24."""
    named = []
    for tenant in ("acme", "emca", "None", "no-tenant", None, "acme|user:1"):
        scope = scopes.tenant(lambda request, tenant=tenant: tenant)
        named.append(scopes.encode(scope(request_of(User(pk=1)))))
    assert named[0] == "tenant:acme|user:1"
    assert len(set(named)) == len(named)


def test_a_tenant_may_be_a_model_instance() -> None:
    scope = scopes.tenant(lambda request: Group(pk=5))
    assert scope(request_of(User(pk=1))) == ("tenant:5", "user:1")


@pytest.mark.parametrize("tenant", [Group(), ""])
def test_a_tenant_without_a_name_is_a_configuration_error(tenant: object) -> None:
    with pytest.raises(ConfigurationError):
        scopes.tenant(lambda request: tenant)(request_of(User(pk=1)))


def test_a_tenant_does_not_make_anonymous_callers_acceptable() -> None:
    with pytest.raises(AnonymousKey):
        scopes.tenant(lambda request: "acme")(request_of(AnonymousUser()))


def test_endpoint_scopes_are_apart_by_route() -> None:
    """BUGS D09, RULES 22."""
    scope = scopes.endpoint()
    match = ResolverMatch(show_scope, (), {"pk": 1}, url_name="pay", namespaces=["orders"])
    assert scope(request_of(User(pk=1), resolver_match=match)) == (
        "user:1",
        "endpoint:orders:pay",
    )
    assert scope(request_of(User(pk=1), resolver_match=None, path="/pay/1/")) == (
        "user:1",
        "endpoint:/pay/1/",
    )


def test_scopes_compose() -> None:
    """BUGS D12."""
    scope = scopes.endpoint(scopes.tenant(lambda request: "acme", scopes.anonymous))
    encoded = scopes.encode(scope(request_of(resolver_match=None, path="/a|b/")))
    assert encoded == r"tenant:acme|anonymous|endpoint:/a\|b/"
