"""What costs the event loop milliseconds is written once, however often it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from specc.server import app
from specc.server import openapi as serve_openapi
from tests.specc.server.serving import serve


def test_the_description_and_the_page_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was written again")

    with serve() as running:
        first = {path: running.get(path) for path in ("/openapi.json", "/")}
        assert first["/openapi.json"].json()["paths"]["/v1/completions"]
        assert "/openapi.json" not in first["/openapi.json"].json()["paths"]
        monkeypatch.setattr(serve_openapi.json, "dumps", never)
        monkeypatch.setattr(type(app._PAGE), "read_bytes", never)
        for path, answer in first.items():
            again = running.get(path)
            assert again.status_code == 200
            assert again.content == answer.content
