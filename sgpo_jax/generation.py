"""Completions of a few prompts from a model directory, for trying a model out (`launch generate`)."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgpo_jax.config import RolloutsConfig
from sgpo_jax.data.templates import load_tokenizer, stop_token_ids
from sgpo_jax.files import read_jsonl
from sgpo_jax.models.safetensors import load_model, resolve_model_dir
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.telemetry import progress
from sgpo_jax.types import Completion, GroupRequest, Purpose, Query, SamplingParams, UserError


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """num: completions of each prompt. raw: the prompts as they are, without the chat template."""

    num: int
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    raw: bool
    compute_dtype: str


def read_prompts(path: Path) -> list[str]:
    """The `prompt` of every line of a JSON-lines file. Raises UserError naming file and line."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise UserError(f'{path}:{number}: not of the form {{"prompt": "some text"}}')
    return [row["prompt"] for row in rows]


def generate(model_path: str, prompts: Sequence[str], options: GenerateOptions) -> Iterator[dict[str, Any]]:
    """For each prompt, in the order given, {"prompt", "completions": [{"text", "token_ids", "logprobs",
    "finish_reason"}]}.

    Raises UserError: no such model, no tokenizer, no prompt, or one without tokens.
    """
    if not prompts:
        raise UserError("no prompts were given; use --prompt TEXT or --prompts FILE.jsonl")
    model_dir = resolve_model_dir(model_path)
    tokenizer = load_tokenizer(model_dir)
    queries = [_query(i, prompt, _token_ids(tokenizer, prompt, options.raw)) for i, prompt in enumerate(prompts)]
    engine = JaxEngine(
        load_model(model_dir, compute_dtype=options.compute_dtype, remat="none"),
        stop_ids=stop_token_ids(model_dir, tokenizer),
        max_prompt_tokens=max(len(query.prompt_ids) for query in queries),
        config=RolloutsConfig(batch_size=min(64, len(queries) * options.num)),
        run_seed=options.seed,
    )
    sampling = SamplingParams(options.max_tokens, options.temperature, options.top_p)
    requests = [GroupRequest(query, options.num, Purpose.EVALUATE) for query in queries]
    found = {}
    with progress("generate", len(requests)) as bar:
        for group in engine.generate(requests, sampling):
            found[group.request.query.query_id] = group
            bar.advance()
    for query in queries:
        completions = found[query.query_id].completions
        yield {"prompt": query.question, "completions": [_row(tokenizer, completion) for completion in completions]}


def _token_ids(tokenizer: Any, prompt: str, raw: bool) -> list[int]:
    if raw:
        token_ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        raise UserError("the model has no chat template; use --raw")
    if not token_ids:
        raise UserError(f"the prompt {prompt!r} has no tokens")
    return list(token_ids)


def _query(number: int, prompt: str, token_ids: Sequence[int]) -> Query:
    query_id = hashlib.blake2b(f"{number}\x1f{prompt}".encode(), digest_size=8).hexdigest()
    return Query(query_id, prompt, "", "exact", "generate", prompt, tuple(token_ids))


def _row(tokenizer: Any, completion: Completion) -> dict[str, Any]:
    return {
        "text": tokenizer.decode(completion.token_ids_C.tolist(), skip_special_tokens=True),
        "token_ids": completion.token_ids_C.tolist(),
        "logprobs": [float(logprob) for logprob in completion.sampler_logprobs_C],
        "finish_reason": completion.finish_reason,
    }
