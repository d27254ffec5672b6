"""The admin: finds by index, never counts or folds case, hides bodies, and tells the truth in words."""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from idempotency import keys
from idempotency.admin import story
from idempotency.models import (
    FINAL,
    Event,
    EventKind,
    MessageStatus,
    Operation,
    OutboxMessage,
    Reference,
    Status,
    Step,
    StepStatus,
)
from tests.test_retention import FUTURE, PAST, elsewhere, hold_lock, make

LIST = reverse("admin:idempotency_operation_changelist")

#: Who asks, which is the same on every page; permissions of a superuser cost nothing.
WHO = ("django_session", "auth_user", "django_content_type")


@pytest.fixture
def staff(client: Client, db: None) -> Client:
    client.force_login(User.objects.create_superuser("admin"))
    return client


def detail(operation: Operation) -> str:
    return reverse("admin:idempotency_operation_change", args=[operation.pk])


def body_of(operation: Operation) -> str:
    return reverse("admin:idempotency_operation_body", args=[operation.pk])


def get(client: Client, url: str, data: dict[str, str] | None = None) -> tuple[str, list[str]]:
    """The page's text, and the SQL it took beside session and user."""
    with CaptureQueriesContext(connection) as queries:
        response = client.get(url, data)
        assert response.status_code == 200
        content = response.content.decode()
    sql = [query["sql"] for query in queries]
    return text_of(content), [one for one in sql if not any(table in one for table in WHO)]


def text_of(html: str) -> str:
    html = re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def listed(client: Client, data: dict[str, str] | None = None, url: str = LIST) -> list[str]:
    response = client.get(url, data)
    assert response.status_code == 200
    return [operation.key for operation in response.context["cl"].result_list]


def grant(user: User, *codenames: str) -> None:
    content_type = ContentType.objects.get_for_model(Operation)
    for codename in codenames:
        permission, _ = Permission.objects.get_or_create(
            codename=codename, content_type=content_type, defaults={"name": codename}
        )
        user.user_permissions.add(permission)


# The list ------------------------------------------------------------------------------------


def test_a_page_of_the_list_is_one_query(staff: Client) -> None:
    """BUGS U03, U04, U06."""
    for number in range(60):
        make(str(number), due_at=FUTURE)
    for data in (
        {},
        {"q": ""},
        {"status__exact": "succeeded"},
        {"status__exact": "reconciling"},
        {"attention": "unfinished"},
    ):
        _, queries = get(staff, LIST, data)
        if not data:  # the first page looks whether the purge keeps up
            assert len(queries) == 1 + len(FINAL)
            del queries[: len(FINAL)]
        (query,) = queries
        assert not re.search(r"COUNT\(|UPPER\(|JOIN|DISTINCT", query, re.IGNORECASE)
        for column in ("body", "headers", "arguments"):
            assert f'"{column}"' not in query.replace("`", '"')


@pytest.mark.parametrize(
    "pasted",
    [
        "order-42",
        "  order-42 ",
        '"order-42"',
        "Idempotency-Key: order-42",
        'idempotency-key: "order-42"',
        "X-Request-Key: order-42",
        "{id}",
        "operation_id: {id}",
        "https://example.org/operations/{id}/?page=1",
        "ORD-7",
        "order:ORD-7",
    ],
)
def test_whatever_support_has_at_hand_finds_the_operation(
    staff: Client, settings: Any, pasted: str
) -> None:
    settings.IDEMPOTENCY = {"KEY_HEADER": "X-Request-Key"}
    operation = make("order-42")
    Reference.objects.create(operation=operation, name="order", value="ORD-7")
    other = make("order-43")
    Reference.objects.create(operation=other, name="order", value="ORD-8")

    assert listed(staff, {"q": pasted.format(id=operation.pk)}) == ["order-42"]
    _, queries = get(staff, LIST, {"q": pasted.format(id=operation.pk)})
    assert len(queries) <= 5
    assert not [sql for sql in queries if re.search(r"COUNT\(|UPPER\(|LIKE", sql, re.IGNORECASE)]


@pytest.mark.parametrize(
    ("key", "pasted"),
    [
        ("receipt:12", "receipt:12"),
        ('say"hi', '"say\\"hi"'),
        ("7c9e6679-7425-40de-944b-e07fc1f90ae7", "7c9e6679-7425-40de-944b-e07fc1f90ae7"),
        ("k" * 255, "k" * 255),
    ],
)
def test_every_key_is_found_as_it_is_written(staff: Client, key: str, pasted: str) -> None:
    make(key)
    make("other")
    assert listed(staff, {"q": pasted}) == [key]


def test_a_reference_that_is_too_long_to_be_stored_whole_is_found(staff: Client) -> None:
    make().refer("document", "https://example.org/" + "x" * 200)
    assert listed(staff, {"q": "https://example.org/" + "x" * 200}) == ["k"]
    assert listed(staff, {"q": "https://example.org/" + "x" * 201}) == []


def test_a_key_of_several_scopes_shows_all_of_them(staff: Client) -> None:
    make()
    make(id=keys.operation_id(("user:2",), "k"), scope="user:2")
    text, _ = get(staff, LIST, {"q": "k"})
    assert "user:1" in text
    assert "user:2" in text


@pytest.mark.parametrize("pasted", ["unknown", "%", "'", '"open', "k" * 300, "ü", ":"])
def test_a_search_that_finds_nothing_says_what_that_means(staff: Client, pasted: str) -> None:
    make()
    text, _ = get(staff, LIST, {"q": pasted})
    assert "Nothing is known by this name" in text
    assert "Show all operations" in text


def test_what_is_unfinished_for_long_can_be_listed(staff: Client) -> None:
    """BUGS B12."""
    make("done")
    make("stuck", status=Status.PROCESSING)
    make("unknown", status=Status.RECONCILING)
    make("started just now", status=Status.PROCESSING, created_at=FUTURE)
    assert set(listed(staff, {"attention": "unfinished"})) == {"stuck", "unknown"}


def test_an_empty_list_says_why_it_is_empty(staff: Client) -> None:
    assert "The first request with a key makes one" in get(staff, LIST)[0]
    make()
    assert "No operation is in this state" in get(staff, LIST, {"attention": "unfinished"})[0]


def test_the_list_says_when_the_purge_does_not_keep_up(staff: Client) -> None:
    """BUGS L09."""
    make("late", due_at=FUTURE)
    assert "The purge does not keep up" not in get(staff, LIST)[0]
    make()
    assert "removed since 2020-01-01 00:00:00" in get(staff, LIST)[0]
    assert "The purge does not keep up" not in get(staff, LIST, {"q": "k"})[0]


def test_pages_go_by_the_last_row_in_both_directions(staff: Client) -> None:
    """Also when rows share a time, and when newer rows arrive meanwhile."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(120):
        make(f"{number:03}", created_at=start + timedelta(seconds=number // 7))
    expected = listed_by_order()

    response = staff.get(LIST)
    pages = [[row.key for row in response.context["cl"].result_list]]
    assert response.context["cl"].previous_page is None
    make("newer", created_at=start + timedelta(days=1))
    while link := response.context["cl"].next_page:
        assert len(pages) < 5
        response = staff.get(LIST + link)
        pages.append([row.key for row in response.context["cl"].result_list])
    assert [len(page) for page in pages] == [50, 50, 20]
    assert [key for page in pages for key in page] == expected

    back = [pages[-1]]
    while link := response.context["cl"].previous_page:
        assert len(back) < 5
        response = staff.get(LIST + link)
        back.append([row.key for row in response.context["cl"].result_list])
    assert [key for page in reversed(back) for key in page] == ["newer", *expected]
    _, queries = get(staff, LIST + pages_link(staff))
    assert len(queries) == 1
    assert not re.search(r"COUNT\(|OFFSET", queries[0], re.IGNORECASE)


def listed_by_order() -> list[str]:
    rows = Operation.objects.order_by("-created_at", "-pk")
    return list(rows.values_list("key", flat=True))


def pages_link(client: Client) -> str:
    link: str = client.get(LIST).context["cl"].next_page
    return link


def test_rows_as_the_database_itself_times_them_are_paged_without_loss(staff: Client) -> None:
    """SQLite keeps the milliseconds of its own clock, Python writes microseconds."""
    from idempotency.db import now

    for number in range(55):
        make(str(number))
    Operation.objects.update(created_at=now("default"))
    first = staff.get(LIST)
    second = staff.get(LIST + first.context["cl"].next_page)
    rows = [*first.context["cl"].result_list, *second.context["cl"].result_list]
    assert len({row.pk for row in rows}) == len(rows) == 55


@pytest.mark.parametrize(
    "data", [{"after": "x"}, {"before": str(uuid.UUID(int=7))}, {"p": "3"}, {"q": "\x00"}]
)
def test_a_link_that_is_broken_or_old_is_no_error(staff: Client, data: dict[str, str]) -> None:
    make()
    listed(staff, data)


def test_the_filter_keeps_neither_the_page_nor_the_search_box_a_cursor(staff: Client) -> None:
    for number in range(60):
        make(str(number))
    html = staff.get(LIST + pages_link(staff)).content.decode()
    links = re.findall(r'href="(\?[^"]*status__exact[^"]*)"', html)
    assert links
    assert not [link for link in links if "after=" in link]
    assert 'name="after"' not in html


@pytest.mark.vendor("postgresql")
def test_list_and_search_go_through_an_index_on_postgresql(staff: Client) -> None:
    for number in range(3000):
        make(str(number), created_at=PAST + timedelta(seconds=number))
    operation = Operation.objects.get(key="1500")
    Reference.objects.bulk_create(
        Reference(operation_id=uuid.uuid4(), name="order", value=f"ORD-{number}")
        for number in range(3000)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    for data in ({}, {"q": "1500"}, {"q": str(operation.pk)}, {"q": "ORD-7"}, {"q": "order:ORD-7"}):
        _, queries = get(staff, LIST, data)
        for query in queries:
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN {query}")
                plan = "\n".join(row[0] for row in cursor.fetchall())
            assert "Index" in plan or "One-Time Filter: false" in plan
            assert "Seq Scan" not in plan
    link = pages_link(staff)
    _, (query,) = get(staff, LIST + link)
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {query}")
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "idempotency_op_created" in plan
    assert "Seq Scan" not in plan


# One operation -------------------------------------------------------------------------------


def add_story(operation: Operation) -> None:
    """Something of everything that can be known about an operation."""
    for minute, (kind, detail_) in enumerate(
        [
            (EventKind.ATTEMPT_FAILED, "app.Timeout in shop.views.pay line 7"),
            (EventKind.TAKEN_OVER, ""),
            (EventKind.REPLAYED, ""),
            (EventKind.REPLAYED, ""),
            (EventKind.REFUSED, "mismatch"),
        ]
    ):
        Event.objects.create(
            operation=operation,
            kind=kind,
            attempt=2 if kind == EventKind.TAKEN_OVER else 1,
            detail=detail_,
            created_at=PAST + timedelta(minutes=minute),
        )
    Reference.objects.create(operation=operation, name="order", value="ORD-7")
    Step.objects.create(
        operation=operation,
        name="charge",
        is_external=True,
        status=StepStatus.STARTED,
        attempt=1,
        started_at=PAST,
    )
    OutboxMessage.objects.create(
        message_id=uuid.uuid4(),
        operation=operation,
        topic="order.created",
        payload='{"secret": "in the payload"}',
        status=MessageStatus.PENDING,
        available_at=PAST,
        created_at=PAST,
    )


def test_an_operation_is_told_from_claim_to_end(staff: Client) -> None:
    """BUGS U05."""
    operation = make("order-42", expires_at=FUTURE, tombstone_until=FUTURE)
    add_story(operation)
    text, queries = get(staff, detail(operation))

    told = [
        "Done once",
        "2 retries got the same answer",
        "Safe: until",
        "Claimed",
        "Attempt 1 failed",
        "app.Timeout in shop.views.pay line 7",
        "Attempt 2 took over",
        "A retry got the stored answer",
        "mismatch: The idempotency key was used for a different request.",
        "ORD-7",
        "charge external Started",
        "order.created",
        "order-42",
        "HTTP 201",
    ]
    assert [words for words in told if words not in text] == []
    assert "in the payload" not in text
    assert len(queries) == 5  # the operation and four kinds of children


def test_the_number_of_queries_does_not_grow_with_the_story(staff: Client, settings: Any) -> None:
    """BUGS U02."""
    operation = make()
    Event.objects.bulk_create(
        Event(operation=operation, kind=EventKind.REPLAYED, attempt=1, detail="", created_at=PAST)
        for _ in range(500)
    )
    text, queries = get(staff, detail(operation))
    assert len(queries) == 5
    assert text.count("A retry got the stored answer") == 200
    assert "More may have happened" in text


@pytest.mark.parametrize(
    ("values", "label", "advice"),
    [
        ({"expires_at": FUTURE, "tombstone_until": FUTURE}, "Succeeded", "Safe: until"),
        ({"tombstone_until": FUTURE}, "Succeeded", "It is refused until"),
        ({}, "Succeeded", "It would be done again"),
        ({"status": Status.FAILED}, "Failed", "only a new key would be a new try"),
        ({"status": Status.REVERSED}, "Reversed", "It failed, and what it had done was undone"),
        ({"status": Status.REQUIRES_ACTION}, "Requires action", "confirming a payment"),
        ({"status": Status.RECONCILING}, "Reconciling", "No: not with another key"),
        (
            {"status": Status.PROCESSING, "stepwise": True, "lease_expires_at": FUTURE},
            "Being executed",
            "Not yet",
        ),
        (
            {"status": Status.PROCESSING, "stepwise": True, "lease_expires_at": PAST},
            "Interrupted",
            "Finished steps are kept",
        ),
    ],
)
def test_the_state_is_told_in_words_with_advice(
    staff: Client, values: dict[str, Any], label: str, advice: str
) -> None:
    text, _ = get(staff, detail(make(**values)))
    assert label in text
    assert advice in text


def test_a_later_reversal_is_told_from_a_failure_that_was_undone(staff: Client) -> None:
    operation = make(status=Status.REVERSED, finished_at=PAST)
    Event.objects.create(
        operation=operation, kind=EventKind.REVERSED, attempt=1, detail="", created_at=FUTURE
    )
    text, _ = get(staff, detail(operation))
    assert f"Done, and undone again at {story.when(FUTURE)}" in text
    assert "Finished: Succeeded" in text


def test_steps_that_undo_others_are_shown_in_words(staff: Client) -> None:
    operation = make(status=Status.REVERSED)
    for name in ("reserve", "~compensating", "~undo:reserve"):
        Step.objects.create(
            operation=operation,
            name=name,
            is_external=False,
            status=StepStatus.STARTED,
            attempt=1,
            started_at=PAST,
        )
    text, _ = get(staff, detail(operation))
    assert "undo of reserve" in text
    assert "~" not in text


def test_what_the_reconciler_gave_up_waits_for_a_person(staff: Client) -> None:
    operation = make(status=Status.RECONCILING)
    assert "It is asked about again at 2020-01-01 00:00:00" in get(staff, detail(operation))[0]
    Event.objects.create(
        operation=operation, kind=EventKind.HANDED_OVER, attempt=1, detail="", created_at=PAST
    )
    assert "somebody has to look on the other side" in get(staff, detail(operation))[0]


@pytest.mark.vendor("postgresql", "mysql")
@pytest.mark.django_db(transaction=True)
def test_an_interrupted_operation_is_told_from_one_that_is_being_executed(client: Client) -> None:
    client.force_login(User.objects.create_superuser("admin"))
    operation = make(status=Status.PROCESSING)
    with elsewhere(hold_lock(operation.pk)):
        text, _ = get(client, detail(operation))
        assert "Being executed" in text
        assert "Processing" in get(client, LIST)[0]  # the list does not ask
    text, queries = get(client, detail(operation))
    assert "Interrupted" in text
    assert "the next retry runs it at once" in text
    assert len(queries) <= 8
    Operation.objects.update(last_error="app.Timeout in shop.views.pay line 7")
    assert "Waiting for a retry" in get(client, detail(operation))[0]
    assert "Waiting for a retry" in get(client, LIST)[0]


@pytest.mark.vendor("postgresql", "mysql")
@pytest.mark.django_db(transaction=True)
def test_looking_does_not_keep_the_lock(client: Client) -> None:
    client.force_login(User.objects.create_superuser("admin"))
    operation = make(status=Status.PROCESSING)
    get(client, detail(operation))
    with elsewhere(hold_lock(operation.pk)):  # fails if the page still held it
        pass


@pytest.mark.vendor("postgresql")
@pytest.mark.django_db(transaction=True)
def test_looking_inside_a_transaction_gives_the_lock_back_at_once() -> None:
    operation = make(status=Status.PROCESSING)
    with transaction.atomic():  # ATOMIC_REQUESTS
        assert story.state(operation) == "interrupted"
        with elsewhere(hold_lock(operation.pk)):
            pass


@pytest.mark.vendor("sqlite")
def test_on_sqlite_the_page_does_not_wait_for_the_one_lock(staff: Client) -> None:
    text, queries = get(staff, detail(make(status=Status.PROCESSING)))
    assert "this database cannot tell" in text
    assert not [sql for sql in queries if not sql.startswith("SELECT")]


def test_an_unknown_operation_leads_back_to_the_list(staff: Client) -> None:
    for pk in (uuid.UUID(int=1), "no-uuid"):
        response = staff.get(reverse("admin:idempotency_operation_change", args=[pk]))
        assert response.status_code == 302
    assert staff.get(body_of(Operation(id=uuid.UUID(int=1)))).status_code == 404


# Permissions and bodies ----------------------------------------------------------------------


def test_nothing_can_be_changed(staff: Client) -> None:
    operation = make()
    add = reverse("admin:idempotency_operation_add")
    delete = reverse("admin:idempotency_operation_delete", args=[operation.pk])
    assert staff.get(add).status_code == 403
    assert staff.post(delete, {"post": "yes"}).status_code == 403
    assert staff.post(detail(operation), {"key": "changed"}).status_code == 403
    action = {"action": "delete_selected", "_selected_action": str(operation.pk), "post": "yes"}
    staff.post(LIST, action)
    operation.refresh_from_db()
    assert operation.key == "k"
    assert "Save" not in get(staff, detail(operation))[0]


@pytest.mark.django_db
def test_the_view_permission_is_needed(client: Client) -> None:
    user = User.objects.create_user("clerk", is_staff=True)
    client.force_login(user)
    operation = make()
    assert client.get(LIST).status_code == 403
    grant(user, "view_operation")
    assert client.get(LIST).status_code == 200
    assert client.get(detail(operation)).status_code == 200


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("permissions", "status"),
    [
        (["view_operation"], 403),
        (["view_operation_body"], 403),
        (["view_operation", "view_operation_body"], 200),
    ],
)
def test_a_stored_response_needs_a_permission_of_its_own(
    client: Client, permissions: list[str], status: int
) -> None:
    user = User.objects.create_user("clerk", is_staff=True)
    grant(user, *permissions)
    client.force_login(user)
    operation = make(body=b"card ending 4242")

    assert client.get(body_of(operation)).status_code == status
    page = client.get(detail(operation)).content.decode()
    assert "4242" not in page
    assert (body_of(operation) in page) is (status == 200)
    seen = LogEntry.objects.filter(user=user, object_id=str(operation.pk))
    assert [entry.get_change_message() for entry in seen] == (
        ["Looked at the stored response."] if status == 200 else []
    )


class Codec:
    def encode(self, body: bytes) -> bytes:
        return body[::-1]

    def decode(self, body: bytes) -> bytes:
        if body.startswith(b"!"):
            raise ValueError
        return body[::-1]


@pytest.mark.parametrize(
    ("body", "codec", "shown"),
    [
        (b'{"order":{"id":1}}', None, '"order": { "id": 1 }'),
        ("grüße <b>".encode(), None, "grüße <b>"),
        (b"\xff\xfe\x00", None, "3 bytes, not text"),
        (b"", None, "Body"),
        (None, None, "not kept"),
        (b"terces", Codec(), "secret"),
        (b"!other", Codec(), "6 bytes, encoded"),
        (b"x" * 150_000, None, "x…"),
    ],
)
def test_every_kind_of_body_can_be_looked_at(
    staff: Client, settings: Any, body: bytes | None, codec: Any, shown: str
) -> None:
    settings.IDEMPOTENCY = {"CODEC": codec}
    operation = make(body=body, headers='{"Location": "/orders/1/"}')
    response = staff.get(body_of(operation))
    assert response.status_code == 200
    text = text_of(response.content.decode())
    assert shown in text
    assert "/orders/1/" in text
    assert b"<b>" not in response.content


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"body": b"12345"}, "5 bytes"),
        ({"body": None}, "not kept"),
        ({"status": Status.PROCESSING, "stepwise": True}, "none yet"),
    ],
)
def test_the_page_says_whether_there_is_a_response(
    staff: Client, values: dict[str, Any], shown: str
) -> None:
    assert shown in get(staff, detail(make(**values)))[0]


# Markup --------------------------------------------------------------------------------------


def test_no_page_needs_inline_scripts_or_styles(staff: Client) -> None:
    operation = make()
    add_story(operation)
    for url in (LIST, detail(operation), body_of(operation)):
        html = staff.get(url).content.decode()
        assert "idempotency/admin.css" in html
        content = html[html.index('id="content"') :]
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", content)
        assert not re.search(r"<script(?![^>]*\bsrc=)[^>]*>", content)


def test_markup_in_what_clients_send_is_shown_not_run(staff: Client) -> None:
    operation = make("<script>alert(1)</script>", name="<img src=x onerror=1>", last_error="<b>")
    for url in (LIST, detail(operation)):
        html = staff.get(url).content.decode()
        assert "<script>alert" not in html
        assert "<img src=x" not in html


@pytest.mark.django_db(databases=["default", "other"])
def test_the_admin_looks_where_the_protocol_writes(staff: Client, settings: Any) -> None:
    settings.IDEMPOTENCY = {"USING": "other"}
    make("here")
    there = make("there", using="other")
    assert listed(staff) == ["there"]
    assert listed(staff, {"q": "there"}) == ["there"]
    assert listed(staff, {"q": "here"}) == []
    assert staff.get(detail(there)).status_code == 200
    assert staff.get(body_of(there)).status_code == 200


def test_pages_work_without_time_zones(staff: Client, settings: Any) -> None:
    operation = make()
    settings.USE_TZ = False
    for url in (LIST, detail(operation)):
        assert staff.get(url).status_code == 200
