"""A payment provider that survives its callers, and may or may not know idempotency keys."""

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.crashes.points import reach


class Declined(Exception):
    """The provider refused; there is no charge."""


class Provider:
    """Its ledger is a file, so a charge stays when the process that asked for it is killed.

    `behaviour` is what happens to the first call of a key: "ok", "decline" (every call), "timeout"
    (nothing happened) or "charged" (it happened, and the answer is a timeout).
    """

    ledger: Path
    behaviour = "ok"
    honours_keys = True

    def open(self, directory: Path, behaviour: str = "ok", *, honours_keys: bool = True) -> None:
        """Start with an empty ledger."""
        self.ledger = directory / "ledger"
        self.ledger.touch()
        self.behaviour = behaviour
        self.honours_keys = honours_keys

    def charge(self, key: str, amount: int) -> str:
        reach("before the charge")
        is_first = not self._entries("called", key)
        self._write("called", key)
        known = self._entries("charge", key)
        if known and self.honours_keys:
            return str(known[0]["id"])
        if self.behaviour == "decline":
            raise Declined("the card was declined")
        if self.behaviour == "timeout" and is_first:
            raise TimeoutError
        charge = self._write("charge", key, amount=amount)
        reach("before the answer")
        if self.behaviour == "charged" and is_first:
            raise TimeoutError
        return charge

    async def acharge(self, key: str, amount: int) -> str:
        return self.charge(key, amount)

    def find(self, key: str) -> str | None:
        """The charge that was made with this reference."""
        found = self._entries("charge", key)
        return str(found[0]["id"]) if found else None

    def refund(self, charge: str, key: str) -> None:
        reach("before the refund")
        if not self._entries("refund", key):
            self._write("refund", key, charge=charge)
        reach("before the thanks")

    def charges(self, key: str) -> int:
        return len(self._entries("charge", key))

    def calls(self, key: str) -> int:
        return len(self._entries("called", key))

    def refunds(self, key: str) -> int:
        """How often the charge that was made with this reference was given back."""
        charge = self.find(key)
        refunds = [entry for entry in self._all() if entry["kind"] == "refund"]
        return len([entry for entry in refunds if entry["charge"] == charge])

    def _write(self, kind: str, key: str, **values: Any) -> str:
        entry = {"kind": kind, "key": key, "id": f"{kind}-{uuid4().hex[:8]}", **values}
        descriptor = os.open(self.ledger, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, json.dumps(entry).encode() + b"\n")  # one write: whole, or not at all
        os.close(descriptor)
        return str(entry["id"])

    def _all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]

    def _entries(self, kind: str, key: str) -> list[dict[str, Any]]:
        return [entry for entry in self._all() if (entry["kind"], entry["key"]) == (kind, key)]
