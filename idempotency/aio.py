"""Sync code from async code, to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from asgiref.sync import sync_to_async

logger = logging.getLogger("idempotency")

T = TypeVar("T")


async def in_thread(
    function: Callable[..., T], *args: Any, discard: Callable[[T], Any] | None = None
) -> T:
    """Call a sync function in the request's thread, to its end even if the caller is cancelled.

    A thread cannot be interrupted: cancellation is raised when the call is over. `discard` gets the
    result that nobody will see then.
    """
    task = asyncio.ensure_future(sync_to_async(function)(*args))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if task.exception() is not None:
        logger.debug("cancelled, and failed meanwhile", exc_info=task.exception())
    elif discard is not None:
        await in_thread(discard, task.result())
    raise cancelled
