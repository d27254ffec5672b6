"""Fixtures of the integrations."""

from collections.abc import Iterator

import pytest

from tests.queues import Queue, queue


@pytest.fixture
def broker() -> Iterator[Queue]:
    """A Celery application on a broker in memory."""
    with queue() as found:
        yield found
