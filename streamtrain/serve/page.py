"""Page: what the API is, for people, at /docs: FastAPI's page, which may run nothing but what it is made of."""

import re
from base64 import b64encode
from hashlib import sha256

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from starlette.routing import Route

_CDN = "https://cdn.jsdelivr.net"


def page_of(app: FastAPI) -> Route:
    """The route of an application's page; it works below any prefix of a proxy, as its addresses are relative."""
    text = bytes(get_swagger_ui_html(openapi_url="openapi.json", title=app.title, swagger_favicon_url="data:,").body)
    scripts = re.findall(rb"<script>(.*?)</script>", text, re.DOTALL)
    hashes = " ".join(f"'sha256-{b64encode(sha256(one).digest()).decode()}'" for one in scripts)
    policy = {
        "default-src": "'none'",
        "script-src": f"{_CDN} {hashes}",
        "style-src": f"{_CDN} 'unsafe-inline'",  # Swagger's own styles; they run nothing
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
    }

    async def show(request: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    return Route("/docs", show, methods=["GET"])
