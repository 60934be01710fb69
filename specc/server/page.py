"""The page at `/`: one file, which loads nothing from elsewhere."""

from __future__ import annotations

import functools
from pathlib import Path

from starlette.responses import HTMLResponse

_FILE = Path(__file__).with_suffix(".html")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
)


def page() -> HTMLResponse:
    """Live figures, asked for at /stats."""
    return HTMLResponse(_read(), headers={"Content-Security-Policy": _POLICY})


@functools.cache
def _read() -> bytes:
    return _FILE.read_bytes()
