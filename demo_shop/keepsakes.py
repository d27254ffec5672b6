"""Small secrets that are made at the first run and kept with the demo's data, never in the repository."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

DATA_DIR = Path(
    os.environ.get("DEMO_DATA_DIR") or Path(__file__).resolve().parent.parent / ".var" / "demo"
).absolute()


def keepsake(name: str, length: int = 12) -> str:
    """The secret kept under `name`, made up on first use; `length` is in random bytes.

    Readable by its owner only. Processes that race for the first use get the same value.
    """
    path = DATA_DIR / "secrets" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{name}.{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(length))
        try:
            os.link(draft, path)  # fails if another process was first, and never shows half a file
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text()
