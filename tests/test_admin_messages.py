"""The admin of outbox messages: what waits and why, and what was given up is sent again by people."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse

from idempotency.models import MessageStatus, OutboxMessage
from tests.test_admin import detail as page_of_operation
from tests.test_admin import get, grant, staff
from tests.test_retention import FUTURE, PAST, make, make_message

__all__ = ["staff"]

LIST = reverse("admin:idempotency_outboxmessage_changelist")
PENDING, SENT, DEAD = MessageStatus.PENDING, MessageStatus.SENT, MessageStatus.DEAD


def detail(message: OutboxMessage) -> str:
    return reverse("admin:idempotency_outboxmessage_change", args=[message.pk])


def listed(client: Client, data: dict[str, Any] | None = None, url: str = LIST) -> list[int]:
    response = client.get(url, data)
    assert response.status_code == 200
    return [message.pk for message in response.context["cl"].result_list]


def send_again(client: Client, *messages: OutboxMessage) -> str:
    chosen = [message.pk for message in messages]
    data = {"action": "send_again", "index": "0", "_selected_action": chosen}
    response = client.post(LIST, data, follow=True)
    assert response.status_code == 200
    return " ".join(str(message) for message in response.context["messages"])


def test_a_page_of_the_list_is_one_query_without_payloads(staff: Client) -> None:
    for _ in range(60):
        make_message()
    for data in ({}, {"status__exact": "sent"}, {"status__exact": "dead"}):
        _, (query,) = get(staff, LIST, data)
        assert not re.search(r"COUNT\(|UPPER\(|JOIN|DISTINCT|payload", query, re.IGNORECASE)


def test_pages_go_by_the_last_row_in_both_directions(staff: Client) -> None:
    expected = sorted((make_message().pk for _ in range(120)), reverse=True)
    response = staff.get(LIST)
    pages = [listed(staff)]
    while link := response.context["cl"].next_page:
        response = staff.get(LIST + link)
        pages.append([row.pk for row in response.context["cl"].result_list])
    assert [pk for page in pages for pk in page] == expected
    assert listed(staff, url=LIST + response.context["cl"].previous_page) == pages[-2]
    assert listed(staff, {"after": "no-number"}) == pages[0]


def test_a_message_is_found_by_its_id_its_operation_or_what_it_is_in_order_with(
    staff: Client,
) -> None:
    operation = make()
    message = make_message(operation=operation, status=PENDING, ordering_key="order:7")
    make_message(ordering_key="order:7")  # sent: only those that wait are indexed by their key
    make_message(status=PENDING, ordering_key="order:8")
    for pasted in (
        f" {message.message_id}",
        f"webhook-id: {message.message_id}",
        operation.pk,
        "order:7",
    ):
        assert listed(staff, {"q": pasted}) == [message.pk]
        _, queries = get(staff, LIST, {"q": str(pasted)})
        assert not [
            sql for sql in queries if re.search(r"COUNT\(|UPPER\(|LIKE", sql, re.IGNORECASE)
        ]
    assert "No message has this id" in get(staff, LIST, {"q": str(uuid.uuid4())})[0]
    assert "No message is in this state" in get(staff, LIST, {"status__exact": "dead"})[0]


@pytest.mark.vendor("postgresql")
def test_the_search_goes_through_an_index_on_postgresql(staff: Client) -> None:
    OutboxMessage.objects.bulk_create(
        OutboxMessage(
            message_id=uuid.uuid4(),
            operation_id=uuid.uuid4(),
            topic="order.created",
            payload="{}",
            ordering_key=f"order:{number}",
            status=PENDING,
            available_at=FUTURE,
            created_at=FUTURE,
        )
        for number in range(3000)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    one = OutboxMessage.objects.latest("pk")
    for pasted in (one.message_id, one.operation_id, one.ordering_key, ""):
        for query in get(staff, LIST, {"q": str(pasted)})[1]:
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN {query}")
                plan = "\n".join(row[0] for row in cursor.fetchall())
            assert "Index" in plan
            assert "Seq Scan" not in plan


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"status": SENT, "sent_at": FUTURE}, "always under this id"),
        ({"status": DEAD, "attempts": 40}, "Given up after 40 attempts."),
        ({"status": DEAD, "attempts": 1}, "Given up after 1 attempt."),
        ({"status": DEAD, "ordering_key": "order:7"}, "Later messages of order:7 wait for it."),
        ({"status": PENDING, "owner": "x", "lease_expires_at": FUTURE}, "A relay has it in hand."),
        ({"status": PENDING, "owner": "x", "lease_expires_at": PAST}, "in hand is gone"),
        ({"status": PENDING, "attempts": 2, "last_error": "app.Down"}, "Attempt 2 failed"),
        ({"status": PENDING, "attempts": 2, "last_error": "app.Down"}, "Last error: app.Down"),
        ({"status": PENDING}, "It waits for the relay"),
    ],
)
def test_what_becomes_of_a_message_is_told_in_words(
    staff: Client, values: dict[str, Any], told: str
) -> None:
    assert told in get(staff, detail(make_message(**values)))[0]


@pytest.mark.parametrize(("rule", "first"), [("block", "invoice.dead"), ("skip", "invoice.late")])
def test_a_message_that_is_held_up_names_the_one_that_has_to_go_first(
    staff: Client, settings: Any, rule: str, first: str
) -> None:
    settings.IDEMPOTENCY = {"OUTBOX_DEAD_HEAD": rule}
    for topic, status in (
        ("invoice.sent", SENT),
        ("invoice.dead", DEAD),
        ("invoice.late", PENDING),
    ):
        make_message(topic=topic, status=status, ordering_key="order:7")
    held = make_message(status=PENDING, ordering_key="order:7")
    text, queries = get(staff, detail(held))
    assert f"First has to go: {first}" in text
    assert len(queries) == 2


def test_dead_letters_are_sent_again_and_it_is_on_record(staff: Client) -> None:
    dead, sent = make_message(status=DEAD, attempts=40), make_message(status=SENT)
    said = send_again(staff, dead, sent)
    assert "1 message will be sent again." in said
    assert "The others are sent" in said
    for message in (dead, sent):
        message.refresh_from_db()
    assert (dead.status, dead.attempts, sent.status) == (PENDING, 0, SENT)
    assert list(LogEntry.objects.values_list("object_id", flat=True)) == [str(dead.pk)]


@pytest.mark.django_db
def test_looking_and_sending_again_are_permissions_of_their_own(client: Client) -> None:
    user = User.objects.create_user("clerk", is_staff=True)
    client.force_login(user)
    dead = make_message(status=DEAD)
    assert client.get(LIST).status_code == 403
    grant(user, "view_outboxmessage")
    assert client.get(detail(dead)).status_code == 200
    send_again(client, dead)
    dead.refresh_from_db()
    assert dead.status == DEAD
    assert client.post(detail(dead), {"topic": "changed"}).status_code == 403
    grant(user, "change_outboxmessage")
    send_again(client, dead)
    dead.refresh_from_db()
    assert dead.status == PENDING


def test_payloads_are_not_shown_and_operations_and_their_messages_lead_to_each_other(
    staff: Client,
) -> None:
    operation = make()
    message = make_message(operation=operation, payload='{"name": "Carla"}')
    page = staff.get(detail(message)).content.decode()
    assert page_of_operation(operation) in page
    assert detail(message) in staff.get(page_of_operation(operation)).content.decode()
    assert "Carla" not in page
    content = page[page.index('id="content"') :]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", content)
