import asyncio

import pytest

from sgpo_jax.rollouts.vllm_guard import Guard

KEY = "secret"


def ask(monkeypatch, scope):
    """The messages that a client gets, and whether the server behind the guard was reached."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    sent, reached = [], []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    async def send(message):
        sent.append(message)

    asyncio.run(Guard(app)({"headers": [], **scope}, None, send))
    return sent, bool(reached)


def bearer(key):
    return (b"authorization", f"Bearer {key}".encode())


@pytest.mark.parametrize("path", ["/v1/completions", "/pause", "/collective_rpc", "/metrics", "/health/", "//health"])
@pytest.mark.parametrize(
    "headers", [[], [bearer("wrong")], [bearer(KEY), bearer("wrong")], [(b"authorization", b"secret")]]
)
def test_without_the_key_every_endpoint_is_closed(monkeypatch, path, headers):
    sent, reached = ask(monkeypatch, {"type": "http", "path": path, "headers": headers})
    assert not reached
    assert sent[0]["status"] == 401


def test_the_key_opens_and_health_needs_none(monkeypatch):
    assert ask(monkeypatch, {"type": "http", "path": "/pause", "headers": [bearer(KEY)]}) == ([], True)
    assert ask(monkeypatch, {"type": "http", "path": "/health"}) == ([], True)
    assert ask(monkeypatch, {"type": "lifespan"}) == ([], True)


def test_web_sockets_need_the_key_too(monkeypatch):
    sent, reached = ask(monkeypatch, {"type": "websocket", "path": "/v1/realtime"})
    assert not reached
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert ask(monkeypatch, {"type": "websocket", "path": "/v1/realtime", "headers": [bearer(KEY)]}) == ([], True)
