"""Every way to write `@idempotent` protects the view, or is refused with advice."""

import inspect
from dataclasses import dataclass
from functools import partial, wraps

import pytest
from django.contrib.auth.decorators import login_required
from django.db import connections, transaction
from django.http import HttpResponse, JsonResponse
from django.test import Client
from django.urls import URLPattern, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import cache_page, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_POST
from django.views.decorators.vary import vary_on_cookie
from django.views.generic import CreateView, FormView
from rest_framework.decorators import api_view
from rest_framework.views import APIView

from idempotency.decorators import idempotent, idempotent_function
from idempotency.exceptions import ConfigurationError
from idempotency.models import Operation
from idempotency.policies import Policy
from tests.app.models import Effect
from tests.callers import effects, is_replay, new_key, operation, problem
from tests.clients import login, send

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


def effect(request, *args, **kwargs):
    """Leave a row, labelled with the key, and say which."""
    row = Effect.objects.create(label=request.headers.get("Idempotency-Key", "no key"))
    return JsonResponse({"effect": row.pk}, status=201)


def plain_decorator(view):
    """What a project's own decorator looks like."""

    @wraps(view)
    def wrapper(*args, **kwargs):
        response = view(*args, **kwargs)
        response.touched = True
        return response

    return wrapper


def careless_decorator(view):
    """One that keeps nothing of the function it wraps."""
    return lambda *args, **kwargs: view(*args, **kwargs)


@idempotent
def bare(request):
    return effect(request)


@idempotent()
def called(request):
    return effect(request)


@idempotent(Policy(required=True))
def with_policy(request):
    return effect(request)


@idempotent(required=True, name="payments.pay")
def with_arguments(request, number):
    return effect(request)


class Direct(View):
    @idempotent()
    def post(self, request):
        return effect(request)


class DirectDispatch(View):
    @idempotent()
    def dispatch(self, *args, **kwargs):
        return super().dispatch(*args, **kwargs)

    def post(self, request):
        return effect(request)


@method_decorator(idempotent(), name="dispatch")
class OnDispatch(View):
    def post(self, request):
        return effect(request)


@method_decorator(idempotent(), name="post")
class OnPost(View):
    def post(self, request):
        return effect(request)


@method_decorator([login_required, idempotent(), never_cache], name="dispatch")
class InAList(View):
    def post(self, request):
        return effect(request)


class Inherited(OnDispatch):
    pass


class Wrapped(View):
    def post(self, request):
        return effect(request)


class Generic(CreateView):
    model = Effect
    fields = ("label", "amount")
    success_url = "/done/"


class AnObject:
    """A view that is an object."""

    def __call__(self, request):
        return effect(request)


FORMS = {
    "bare": bare,
    "called": called,
    "with_policy": with_policy,
    "direct": Direct.as_view(),
    "direct_dispatch": DirectDispatch.as_view(),
    "on_dispatch": OnDispatch.as_view(),
    "on_post": OnPost.as_view(),
    "in_a_list": InAList.as_view(),
    "inherited": Inherited.as_view(),
    "on_as_view": idempotent()(Wrapped.as_view()),
    "partial": idempotent()(partial(effect)),
    "object": idempotent()(AnObject()),
    "above_csrf_exempt": idempotent()(csrf_exempt(effect)),
    "below_csrf_exempt": csrf_exempt(idempotent()(effect)),
    "above_atomic": idempotent()(transaction.atomic(effect)),
    "below_atomic": transaction.atomic(idempotent()(effect)),
    "above_non_atomic_requests": idempotent()(transaction.non_atomic_requests(partial(effect))),
    "below_non_atomic_requests": transaction.non_atomic_requests(idempotent()(partial(effect))),
    "above_cache": idempotent()(cache_page(60)(effect)),
    "below_cache": cache_page(60)(idempotent()(effect)),
    "above_never_cache": idempotent()(never_cache(effect)),
    "below_never_cache": never_cache(idempotent()(effect)),
    "above_require_POST": idempotent()(require_POST(effect)),
    "below_require_POST": require_POST(idempotent()(effect)),
    "above_login_required": idempotent()(login_required(effect)),
    "below_login_required": login_required(idempotent()(effect)),
    "above_vary": idempotent()(vary_on_cookie(effect)),
    "below_vary": vary_on_cookie(idempotent()(effect)),
    "above_gzip": idempotent()(gzip_page(effect)),
    "below_gzip": gzip_page(idempotent()(effect)),
    "above_own": idempotent()(plain_decorator(effect)),
    "below_own": plain_decorator(idempotent()(effect)),
    "above_careless": idempotent()(careless_decorator(effect)),
    "below_careless": careless_decorator(idempotent()(effect)),
}  # fmt: skip


@method_decorator(idempotent(), name="dispatch")
class DispatchOfRestFramework(APIView):
    def post(self, request):
        return effect(request)


class DirectDispatchOfRestFramework(APIView):
    @idempotent()
    def dispatch(self, request, *args, **kwargs):
        return super().dispatch(request, *args, **kwargs)

    def post(self, request):
        return effect(request)


urlpatterns: list[URLPattern] = [
    *(path(f"{name}/", view) for name, view in FORMS.items()),
    path("orders/<int:number>/pay/", with_arguments, name="pay"),
    path("safe/", idempotent(required=True)(lambda request: HttpResponse("read"))),
    path("generic/", idempotent(required=True)(Generic.as_view())),
    path("drf-dispatch/", DispatchOfRestFramework.as_view()),
    path("drf-direct-dispatch/", DirectDispatchOfRestFramework.as_view()),
]


@pytest.fixture(params=[False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
def _both_ways(request, monkeypatch):
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", request.param)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_runs_once_and_replays(form):
    """J01, J02, D15: whatever it is written on and stacked with, the second request is a replay."""
    client, key = login(), new_key()

    first = send(client, f"/{form}/", key)
    second = send(client, f"/{form}/", key)

    assert (first.status_code, is_replay(first)) == (201, False)
    assert (second.status_code, second.content) == (201, first.content)
    assert is_replay(second)
    assert effects(key) == 1


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("form", [form for form in FORMS if form != "with_policy"])
def test_every_form_lets_requests_without_a_key_through(form):
    """Optional protection: no key, no operation, and the view runs each time."""
    client = login()

    for _ in range(2):
        assert send(client, f"/{form}/").status_code == 201

    assert effects("no key") == 2
    assert not Operation.objects.exists()


def test_a_view_that_requires_a_key_refuses_to_run_without():
    """A08: 400, not a key made by the server."""
    assert problem(send(login(), "/with_policy/")) == "missing-key"


def test_a_decorated_generic_view_creates_one_row():
    """A form view of Django's, protected from outside, redirects again without saving again."""
    client, key = login(), new_key()
    form = {"label": key, "amount": "3"}

    answers = [client.post("/generic/", form, headers={"Idempotency-Key": key}) for _ in range(2)]

    assert [(a.status_code, a["Location"]) for a in answers] == [(302, "/done/")] * 2
    assert answers[1].url == "/done/"
    assert effects(key) == 1


def test_the_path_arguments_belong_to_the_request():
    """D07: one key for /orders/1/pay/ and /orders/2/pay/ is a mismatch, never the wrong reply."""
    client, key = login(), new_key()

    assert send(client, "/orders/1/pay/", key).status_code == 201
    assert problem(send(client, "/orders/2/pay/", key)) == "mismatch"


def test_the_operation_is_named_by_the_policy_else_the_route_else_the_function():
    client = login()
    keys = {name: new_key() for name in ("orders/1/pay", "bare", "on_dispatch")}

    for url, key in keys.items():
        send(client, f"/{url}/", key)

    names = {url: operation(key).name for url, key in keys.items()}
    assert names == {
        "orders/1/pay": "payments.pay",
        "bare": "tests.test_decorators.bare",
        "on_dispatch": "tests.test_decorators.OnDispatch.dispatch",
    }


def test_the_decorated_function_keeps_its_name_and_attributes():
    """J02: flags that other decorators left on the view survive, and so do the policy and the name."""
    exempt = idempotent(required=True)(csrf_exempt(effect))

    assert exempt.csrf_exempt
    assert exempt.__name__ == "effect"
    assert exempt.__doc__ == effect.__doc__
    assert exempt.idempotency_policy == Policy(required=True)
    assert exempt._non_atomic_requests == {"default"}
    assert not inspect.iscoroutinefunction(exempt)


def test_as_view_shows_the_policy_of_a_decorated_dispatch():
    """Checks and audits find out which routes are protected."""
    assert OnDispatch.as_view().idempotency_policy == Policy()
    assert OnDispatch.as_view()._non_atomic_requests == {"default"}


def test_another_database_opts_out_of_that_databases_transactions():
    assert idempotent(using="other")(partial(effect))._non_atomic_requests == {"other"}


class Twice:
    @idempotent()
    def view(self, request):
        """Decorated already."""


@pytest.mark.parametrize(
    ("decorate", "advice"),
    [
        (lambda: idempotent()(APIView.as_view()), "IdempotencyMixin"),
        (lambda: idempotent()(api_view(["POST"])(effect)), "below @api_view"),
        (lambda: idempotent(FormView), "method_decorator"),
        (lambda: idempotent()(APIView), "method_decorator"),
        (lambda: idempotent()(bare), "already"),
        (lambda: idempotent()(plain_decorator(bare)), "already"),
        (lambda: idempotent()(OnDispatch.as_view()), "already"),
        (lambda: idempotent()(Twice.view), "already"),
        (lambda: idempotent(Policy(), required=True), "not both"),
        (lambda: idempotent(bare, required=True), "one Policy"),
        (lambda: idempotent("payments"), "one Policy"),
        (lambda: idempotent(methods="POST"), "collection"),
    ],
)  # fmt: skip
def test_what_cannot_protect_is_refused_at_import(decorate, advice):
    """J01: never a decorator that silently does nothing."""
    with pytest.raises(ConfigurationError, match=advice):
        decorate()


@pytest.mark.parametrize("url", ["/drf-dispatch/", "/drf-direct-dispatch/"])
def test_dispatch_of_a_rest_framework_view_refuses_to_serve(url):
    """J01: there it would claim before authentication; the first request says so, with any method."""
    client = login()
    client.raise_request_exception = True

    for method in ("post", "get"):
        with pytest.raises(ConfigurationError, match="IdempotencyMixin"):
            send(client, url, new_key(), method=method)

    assert not Effect.objects.exists()


def test_a_call_without_a_request_is_an_error():
    with pytest.raises(TypeError, match="got no request"):
        bare()
    with pytest.raises(TypeError, match="got no request"):
        bare("an argument", "another one")


def test_what_a_policy_is_given_need_not_be_hashable():
    @dataclass
    class Codec:
        key: bytes = b"key"

        def encode(self, data):
            return data

        decode = encode

    policy = Policy(codec=Codec())
    assert policy.resolved() is Policy(codec=Codec()).resolved()
    assert policy.resolved() is not Policy(codec=Codec(b"other")).resolved()


def test_an_unknown_option_is_an_error_at_import():
    """J11 for the decorator: a misspelt option is never ignored."""
    with pytest.raises(TypeError, match="requried"):
        idempotent(requried=True)


def test_both_public_decorators_come_from_one_module():
    assert idempotent_function.__module__ == "idempotency.functions"


@pytest.mark.parametrize("method", ["get", "head", "options", "trace"])
def test_safe_methods_ignore_the_key_and_do_no_query(method, django_assert_num_queries):
    """J07: no record, no query, the view's own answer."""
    client = Client()

    with django_assert_num_queries(0):
        responses = [
            getattr(client, method)("/safe/", headers={"Idempotency-Key": key})
            for key in ("k", "k", "not,a,key")
        ]

    assert {response.status_code for response in responses} == {200}
    assert not Operation.objects.exists()
