"""Celery's broker in a folder, for several processes that write at once.

Kombu's own shows a message's file before it is written: a worker that looks at that moment takes half a
message, and dies of it. Here files appear when they are complete.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from time import monotonic
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:
        # In the order of their names; a name with another end is not looked at.
        name = f"{round(monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
        path = os.path.join(self.data_folder_out, name)
        with open(f"{path}.draft", "w") as file:
            file.write(dumps(payload))
        os.rename(f"{path}.draft", path)

    def _queue_bind(self, exchange: str, *args: Any) -> None:
        path = self._exchange_file(exchange)
        if not path.exists():
            self.control_folder.mkdir(exist_ok=True)
            draft = path.with_name(f"{path.name}.{uuid.uuid4()}")
            draft.write_text("[]")
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(draft, path)
            draft.unlink()
        super()._queue_bind(exchange, *args)


class Transport(filesystem.Transport):
    Channel = Channel
