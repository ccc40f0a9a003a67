"""Who may ask, and how much at once: API keys and body sizes, checked before anything is read."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from retrodraft.server.protocol import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/metrics")  # they show no text


class Access:
    """ASGI middleware: puts the caller's namespace into the request's state, refuses what may not pass."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int, fail: Callable[[int], None]) -> None:
        self._app, self._max, self._fail = app, max_body_bytes, fail
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"]}
        try:
            scope.setdefault("state", {})["namespace"] = self._namespace(scope["path"], headers)
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > self._max:
                raise ApiError(413, self._too_large())
        except ApiError as error:
            self._fail(error.status)
            extra = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            await JSONResponse(error.body(), error.status, extra)(scope, receive, send)
            return
        seen = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise HTTPException(413, self._too_large())
            return message

        await self._app(scope, counted, send)

    def _namespace(self, path: str, headers: dict[bytes, bytes]) -> str:
        """Named after the key's digest, so that a store's folder does not show the key."""
        if not self._digests or path in OPEN_PATHS:
            return "default"
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        known = [hmac.compare_digest(digest, other) for other in self._digests]  # all, for constant time
        if scheme.lower() != b"bearer" or not any(known):
            raise ApiError(
                401, "send a valid API key, as 'Authorization: Bearer KEY'", kind="authentication_error",
                code="invalid_api_key",
            )  # fmt: skip
        return f"key-{digest.hex()[:32]}"

    def _too_large(self) -> str:
        return f"the request body is larger than {self._max} bytes: send less, or raise --max-body-bytes"
