"""What a vLLM server looks like from outside, with a bigram model: the logits of the next token are E[last] @ H.T.

Run as a script with vLLM's options. Faults are switched on with POST /fake {name: how many times}; GET /fake tells what
was asked for. Environment: FAKE_VERSION, FAKE_START_DELAY (seconds until healthy), FAKE_CHILD (start a process that
ignores SIGTERM and holds shared memory, as a worker might).
"""

import argparse
import json
import multiprocessing
import multiprocessing.shared_memory
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

FAULTS = ("fail_completion", "refuse_completion", "hang_completion", "cut_completion", "die_completion", "drop_sample")
FAULTS += ("fail_reload", "forget_reload", "fail_reset", "fail_sleep", "hang_sleep", "fail_wake")


class State:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.faults = dict.fromkeys(FAULTS, 0)
        self.calls: list[str] = []
        self.requests: list[dict] = []
        self.paused = False
        self.asleep = False
        self.cache: dict = {}
        self.lock = threading.Lock()
        self.healthy_at = time.monotonic() + float(os.environ.get("FAKE_START_DELAY", "0"))
        self.load(Path(options.model))

    def load(self, directory: Path) -> None:
        self.directory = directory
        weights = load_file(directory / "model.safetensors")
        self.embedding_VD = weights["model.embed_tokens.weight"].astype(np.float64)
        self.head_VD = weights["lm_head.weight"].astype(np.float64)

    def strikes(self, fault: str) -> bool:
        with self.lock:
            self.faults[fault] -= 1
            return self.faults[fault] >= 0

    def logprobs(self, last: int, temperature: float) -> np.ndarray:
        logits_V = self.embedding_VD[last] @ self.head_VD.T / (temperature or 1.0)
        return logits_V - np.log(np.exp(logits_V - logits_V.max()).sum()) - logits_V.max()

    def sample(self, body: dict, index: int) -> dict:
        rng = np.random.default_rng(body["seed"] + index)
        ids, logprobs = [], []
        while len(ids) < body["max_tokens"] and (not ids or ids[-1] not in body["stop_token_ids"]):
            logprobs_V = self.logprobs(ids[-1] if ids else body["prompt"][-1], body["temperature"])
            if not ids:  # what a prefix cache would hold: of the weights that first read the prompt
                logprobs_V = self.cache.setdefault(
                    (body["cache_salt"], body["temperature"], *body["prompt"]), logprobs_V
                )
            greedy = not body["temperature"]
            token = int(logprobs_V.argmax()) if greedy else int(rng.choice(len(logprobs_V), p=np.exp(logprobs_V)))
            ids.append(token)
            logprobs.append(float(logprobs_V[token]))
        stopped = ids[-1] in body["stop_token_ids"]
        return {
            "index": index,
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": "stop" if stopped else "length",
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        state = self.state
        if self.path == "/health":
            self.answer({}, 200 if time.monotonic() >= state.healthy_at else 503)
        elif self.path == "/fake":
            what = {"calls": state.calls, "requests": state.requests, "paused": state.paused, "asleep": state.asleep}
            what |= {"weights": str(state.directory)}
            self.answer(what)
        elif self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.answer({"error": "Unauthorized"}, 401)
        elif self.path == "/version":
            self.answer({"version": os.environ.get("FAKE_VERSION", "0.32.0")})
        elif self.path == "/v1/models":
            self.answer({"data": [{"id": "policy", "max_model_len": state.options.max_model_len}]})
        else:
            self.answer({}, 404)

    def do_POST(self) -> None:
        state = self.state
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        path, _, self.query = self.path.partition("?")
        if path == "/fake":
            state.faults |= body
            self.answer({})
            return
        if self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.answer({"error": "Unauthorized"}, 401)
            return
        state.calls.append(path)
        {
            "/v1/completions": self.complete,
            "/collective_rpc": self.reload,
            "/pause": lambda _: self.pause(True),
            "/resume": lambda _: self.pause(False),
            "/reset_prefix_cache": self.reset,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
        }[path](body)

    def pause(self, paused: bool) -> None:
        self.state.paused = paused
        self.answer({"status": "ok"})

    def sleep(self, _: dict) -> None:
        fails = "--enable-sleep-mode" not in sys.argv or self.query != "level=1&mode=wait"
        if self.state.strikes("hang_sleep"):
            time.sleep(60)
        if fails or self.state.strikes("fail_sleep"):
            self.answer({"error": "sleep failed"}, 500)
            return
        self.state.asleep = True
        self.state.cache.clear()
        self.answer({"status": "sleeping"})

    def wake_up(self, _: dict) -> None:
        if self.state.strikes("fail_wake"):
            self.answer({"error": "wake failed"}, 500)
            return
        self.state.asleep = False
        self.answer({"status": "awake"})

    def reload(self, body: dict) -> None:
        assert body["method"] == "reload_weights"
        if not self.state.paused or self.state.asleep or self.state.strikes("fail_reload"):
            self.answer({"error": "reload failed"}, 500)
            return
        if not self.state.strikes("forget_reload"):
            self.state.load(Path(body["kwargs"]["weights_path"]))
        self.answer({"results": [None]})

    def reset(self, _: dict) -> None:
        fails = self.state.strikes("fail_reset")
        if not fails:
            self.state.cache.clear()
        self.answer({"success": not fails})

    def complete(self, body: dict) -> None:
        state = self.state
        if state.asleep:  # the real one would not answer before it wakes
            self.answer({"error": "asleep"}, 500)
            return
        if body.get("prompt_logprobs") is not None:
            ids = body["prompt"]
            found = [{str(b): {"logprob": float(state.logprobs(a, 1.0)[b])}} for a, b in pairwise(ids)]
            self.answer({"choices": [{"index": 0, "prompt_logprobs": [None, *found]}]})
            return
        state.requests.append(body)
        if state.strikes("die_completion"):
            os._exit(1)
        if state.strikes("fail_completion"):
            self.answer({"error": "engine"}, 500)
        elif state.strikes("refuse_completion"):
            self.answer({"error": "bad request"}, 400)
        else:
            if state.strikes("hang_completion"):
                time.sleep(60)
            choices = [state.sample(body, index) for index in range(body["n"])]
            if state.strikes("cut_completion"):
                choices[0] |= {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
            if state.strikes("drop_sample"):
                choices.pop()
            self.answer({"choices": choices[::-1]})


def child() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    print("shared memory", memory.name, f"sem.{semaphore._semlock.name.lstrip('/')}", flush=True)
    time.sleep(600)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--host"):
        parser.add_argument(name)
    for name in ("--port", "--max-model-len"):
        parser.add_argument(name, type=int)
    options, _ = parser.parse_known_args()
    print("fake vLLM", flush=True)
    if "FAKE_CHILD" in os.environ and os.fork() == 0:
        child()
    Handler.state = State(options)
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
