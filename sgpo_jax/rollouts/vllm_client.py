"""Talks to one vLLM server over HTTP: completions, log-probs of given tokens, new weights. Knows vLLM's wire format."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from sgpo_jax.types import FinishReason, MachineError, SamplingParams, UserError

OLDEST, TOO_NEW = (0, 32), (0, 34)  # the supported range, the second not in it

_ANSWER_S = 30.0  # for everything that takes no time


class ServerError(MachineError):
    """The server failed, is gone or gave no answer in time. It may work when asked again."""


class NoAnswerError(ServerError):
    """The time limit passed: the server hangs, or has more to do than fits into it."""


class RequestRefusedError(MachineError):
    """The server refuses this request; asking again will not help."""


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """num_samples completions of one prompt; sample i draws from seed + i. stop_ids: all that ends one."""

    prompt_ids: tuple[int, ...]
    num_samples: int
    seed: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """token_ids_C: int32, the stop token included. logprobs_C: float32, of the distribution that was drawn from."""

    token_ids_C: np.ndarray
    logprobs_C: np.ndarray
    finish_reason: FinishReason


class VLLMClient:
    """One server. Every call raises ServerError or RequestRefusedError, and ends within its time limit (seconds)."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=_ANSWER_S,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy for the world is none for this machine
        )
        self._model = ""
        self.max_model_len = 0

    async def close(self) -> None:
        await self._http.aclose()

    async def is_healthy(self) -> bool:
        try:
            return (await self._http.get("/health")).status_code == 200
        except httpx2.HTTPError:
            return False

    async def introduce(self) -> None:
        """Learn the model's name and length. Raises UserError where the server's version is not supported."""
        check_version((await self._call("GET", "/version", None, _ANSWER_S))["version"], self.url)
        model = (await self._call("GET", "/v1/models", None, _ANSWER_S))["data"][0]
        self._model, self.max_model_len = model["id"], model["max_model_len"]

    async def complete(self, call: CompletionCall, salt: str, limit_s: float) -> list[Choice]:
        """The samples of a call in their order. salt: prompts read under another one are never reused.

        Raises ServerError also where the answer is not what was asked for: a prompt cut, a completion cut early.
        """
        body = {
            "model": self._model,
            "prompt": list(call.prompt_ids),
            "n": call.num_samples,
            "seed": call.seed,
            "max_tokens": call.sampling.max_completion_tokens,
            "temperature": call.sampling.temperature,
            "top_p": call.sampling.top_p,
            "top_k": -1,
            "ignore_eos": True,  # stop_ids holds them all
            "stop_token_ids": list(call.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        answer = await self._call("POST", "/v1/completions", body, limit_s)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(call.num_samples)):
            raise ServerError(f"{self.url}: {len(choices)} completions where {call.num_samples} were asked for")
        return [_choice(self.url, choice, call) for choice in choices]

    async def logprobs(self, token_ids: Sequence[int], salt: str, limit_s: float) -> np.ndarray:
        """Log-probs of every token but the first, at temperature 1: float32."""
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
            "cache_salt": salt,
        }
        answer = await self._call("POST", "/v1/completions", body, limit_s)
        found = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(token_ids[1:], found[1:], strict=True)
        return np.array([entry[str(token_id)]["logprob"] for token_id, entry in pairs], np.float32)

    async def load_weights(self, directory: Path, limit_s: float) -> None:
        """Exchange the weights for those of a directory that the server can read, and forget cached prompts."""
        await self._call("POST", "/pause?mode=wait", None, limit_s)
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._call("POST", "/collective_rpc", call, limit_s)
        reset = await self._call("POST", "/reset_prefix_cache", None, _ANSWER_S)
        if reset.get("success") is not True:
            raise ServerError(f"{self.url}: the cache of prompts could not be reset")
        await self._call("POST", "/resume", None, _ANSWER_S)

    async def sleep(self, limit_s: float) -> None:
        """Move the weights off the devices and give up the cache of prompts, once nothing is being answered."""
        await self._call("POST", "/sleep?level=1&mode=wait", None, limit_s)

    async def wake_up(self, limit_s: float) -> None:
        """The end of `sleep`. What it then has for weights is to be loaded anew."""
        await self._call("POST", "/wake_up", None, limit_s)

    async def _call(self, method: str, path: str, body: Any, limit_s: float) -> Any:
        try:
            response = await self._http.request(method, path, json=body, timeout=limit_s)
        except httpx2.TimeoutException:
            raise NoAnswerError(f"{self.url}{path}: no answer within {limit_s:.0f} s") from None
        except httpx2.HTTPError as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from None
        if response.status_code == 200:
            return response.json() if response.content else {}
        text = f"{self.url}{path}: status {response.status_code}: {' '.join(response.text.split())[:500]}"
        raise (RequestRefusedError if 400 <= response.status_code < 500 else ServerError)(text)


def _choice(url: str, raw: dict[str, Any], call: CompletionCall) -> Choice:
    token_ids_C = np.array(raw["token_ids"], np.int32)
    logprobs_C = np.array(raw["logprobs"]["token_logprobs"], np.float32)
    reason, limit = raw["finish_reason"], call.sampling.max_completion_tokens
    is_whole = (reason == "stop" and len(token_ids_C) > 0 and int(token_ids_C[-1]) in call.stop_ids) or (
        reason == "length" and len(token_ids_C) == limit
    )
    if not is_whole or len(token_ids_C) != len(logprobs_C) or tuple(raw["prompt_token_ids"]) != call.prompt_ids:
        raise ServerError(
            f"{url}: a completion of {len(token_ids_C)} tokens (limit {limit}), {len(logprobs_C)} log-probs and "
            f"{len(raw['prompt_token_ids'])} prompt tokens (of {len(call.prompt_ids)}), ended by {reason!r}: not whole"
        )
    return Choice(token_ids_C, logprobs_C, FinishReason(reason))


def check_version(version: str, where: str) -> None:
    """Raises UserError where this version of vLLM is not supported; `where` says in it which one it is."""
    if not OLDEST <= _major_minor(version) < TOO_NEW:
        allowed = f"{_dotted(OLDEST)} or newer, older than {_dotted(TOO_NEW)}"
        raise UserError(f"{where}: vLLM {version} is not supported; allowed is {allowed} (tools/setup_vllm.sh)")


def _major_minor(version: str) -> tuple[int, ...]:
    """0.32.1rc1 -> (0, 32); what is no number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
