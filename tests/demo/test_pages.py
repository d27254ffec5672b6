"""Pages that the shop shows when something is wrong."""

from __future__ import annotations

import json

from .conftest import Demo


def test_errors_have_pages_that_lead_back(demo: Demo) -> None:
    code = """
import json
from django.test import Client, RequestFactory
from django.views.defaults import server_error
client = Client(enforce_csrf_checks=True, SERVER_NAME="localhost")
pages = {
    404: client.get("/nothing/here/"),
    403: client.post("/sign-in/"),
    500: server_error(RequestFactory().get("/")),
}
print(json.dumps([code for code, page in pages.items() if page.status_code == code and b'href="/"' in page.content]))
"""
    assert json.loads(demo.run(code)) == [404, 403, 500]
