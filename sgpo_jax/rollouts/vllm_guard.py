"""ASGI middleware that runs inside the vLLM server: every endpoint but /health wants the run's key.

vLLM's own key covers /v1 alone; pausing, reloading weights and calling methods of the workers would be open to every
user of the machine. This file is copied next to the server, and imports the standard library only.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_OPEN = "/health"


class Guard:
    """Answers 401 to a request without `Authorization: Bearer $VLLM_API_KEY`, and closes such a WebSocket."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _is_allowed(self, scope: Message) -> bool:
        if scope["type"] == "http" and scope["path"] == _OPEN:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
