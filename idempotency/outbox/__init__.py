"""Messages that are written in the transaction of what they tell about, and published by a relay.

    with transaction.atomic():
        order = Order.objects.create(...)
        outbox.enqueue("order.created", {"order_id": order.pk}, ordering_key=f"order:{order.pk}")

What is promised: a message of a committed transaction is published at least once, always under
the same id; one of a rolled-back transaction never is. Consumers deduplicate by the id, as
`@outbox.handler` functions do by themselves.
"""

from .handlers import handler
from .messages import Message, PermanentFailure, PublishFailed, RetryAfter, enqueue
from .publishers import Publisher, UnknownTopic, by_topic
from .relays import Relay, Summary, relay
from .upkeep import Backlog, backlog, purge_dead, purge_sent, redrive

__all__ = [
    "Backlog",
    "Message",
    "PermanentFailure",
    "PublishFailed",
    "Publisher",
    "Relay",
    "RetryAfter",
    "Summary",
    "UnknownTopic",
    "backlog",
    "by_topic",
    "enqueue",
    "handler",
    "purge_dead",
    "purge_sent",
    "redrive",
    "relay",
]
