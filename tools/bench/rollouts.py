"""Throughput of the vLLM engine against a bare load generator, on the same server and the same requests, in turns.

    VLLM_CPU_OMP_THREADS_BIND=nobind python -m tools.bench rollouts sgpo_jax/demo/model --platform cpu
    python -m tools.bench rollouts Qwen2.5-Math-7B --max-tokens 1024 --dtype bfloat16 --prompt-tokens 200

Prompts are random tokens. The bare generator posts bodies made beforehand and counts tokens; the engine does all it
does in a run: seeds, checks of every answer, arrays, groups. Both ask for the same completions, by turns first and
second; the first pair, which warms up, does not count.
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import httpx2
import numpy as np
from flax import nnx

from sgpo_jax.config import parse_config
from sgpo_jax.data.templates import load_tokenizer, stop_token_ids
from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.safetensors import load_model, resolve_model_dir
from sgpo_jax.rollouts.engine import Probe, sample_seed
from sgpo_jax.rollouts.placement import claim, num_gpus, place
from sgpo_jax.rollouts.probe import Prober
from sgpo_jax.rollouts.vllm_engine import VLLMEngine, make_vllm_engine
from sgpo_jax.types import GroupRequest, Purpose, Query, SamplingParams
from tools.bench.report import Report, Row

RUN_SEED = 0


@click.command(help=__doc__)
@click.argument("model")
@click.option("--platform", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--num", type=click.IntRange(min=1), default=8, show_default=True, help="Samples of each request.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=2), default=31, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(
    model: str,
    platform: str,
    dtype: str,
    requests: int,
    num: int,
    prompt_tokens: int,
    max_tokens: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    rng = np.random.default_rng(0)
    model_dir = resolve_model_dir(model)
    vocab_size = read_architecture(model_dir).vocab_size
    prompts = [tuple(rng.integers(0, vocab_size, prompt_tokens).tolist()) for _ in range(requests)]
    with tempfile.TemporaryDirectory() as directory:
        engine, _ = start(model_dir, platform, dtype, prompts, max_tokens, Path(directory) / "vllm.log")
        try:
            ratios = [pair(engine, prompts, num, max_tokens, visit) for visit in range(rounds + 1)][1:]
        finally:
            engine.close()
    rows = [Row("seconds for the same completions", ratios, against="a bare load generator", at_most=1.1)]
    settings = {"model": model_dir.name, "dtype": dtype, "requests": requests, "samples": num, "runs": rounds}
    Report("vLLM engine", settings, rows).finish(json_file)


def start(
    model_dir: Path, platform: str, dtype: str, prompts: list[tuple[int, ...]], max_tokens: int, log: Path
) -> tuple[VLLMEngine, Probe]:
    """An engine with its server, and the probe of its weights."""
    gpus = num_gpus(os.environ)
    one = {"memory_frac": 0.45} if platform == "cuda" and gpus == 1 else {}
    config = parse_config(
        {
            "run_dir": "unused",
            "seed": RUN_SEED,
            "model": {"path": str(model_dir), "compute_dtype": dtype, "remat": "none"},
            "data": {"train": [{"path": "unused"}]},
            "rollouts": {"engine": "vllm", "max_completion_tokens": max_tokens},
            "vllm": {"platform": platform, "placement": "shared" if one else "split", **one},
        },
        where="benchmark",
    )
    config = place(config, gpus)
    claim(config)
    model = load_model(model_dir, compute_dtype=dtype, remat="none")
    stop_ids = stop_token_ids(model_dir, load_tokenizer(model_dir))
    params = nnx.state(model)
    probe = Prober(model, [prompts[0]], stop_ids[0], chunk_tokens=1024)(params)
    engine = make_vllm_engine(
        config,
        read_architecture(model_dir),
        model_dir,
        stop_ids=stop_ids,
        longest_prompt=max(map(len, prompts)),
        log=log,
        initial=params,
        probe=probe,
    )
    return engine, probe


def query(number: int, prompt_ids: tuple[int, ...]) -> Query:
    return Query(f"q{number}", "", "", "exact", "benchmark", "", prompt_ids)


def pair(engine: VLLMEngine, prompts: list[tuple[int, ...]], num: int, max_tokens: int, visit: int) -> float:
    """The engine's seconds for a token over the bare generator's, on requests that differ from visit to visit."""
    requests = [GroupRequest(query(i, ids), num, Purpose.TRAIN, visit) for i, ids in enumerate(prompts)]
    loads = [("engine", by_engine), ("bare", bare)]
    rates, counts = {}, set()
    for name, load in loads if visit % 2 else loads[::-1]:
        began = time.monotonic()
        count = load(engine, requests, max_tokens)
        rates[name] = count / (time.monotonic() - began)
        counts.add(count)
        print(f"pair {visit} {name:6} {rates[name]:9.0f} tokens/s, {count} tokens", flush=True)
    if len(counts) > 1:
        print("the two drew different completions: the ratio is between unlike loads")
    return rates["bare"] / rates["engine"]


def by_engine(engine: VLLMEngine, requests: list[GroupRequest], max_tokens: int) -> int:
    groups = engine.generate(requests, SamplingParams(max_tokens))
    return sum(len(completion.token_ids_C) for group in groups for completion in group.completions)


def bare(engine: VLLMEngine, requests: list[GroupRequest], max_tokens: int) -> int:
    [replica] = engine._replicas
    bodies = [
        {
            "model": "policy",
            "prompt": list(request.query.prompt_ids),
            "n": request.num_samples,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": sample_seed(RUN_SEED, request, 0) >> 1,  # as the engine has it
            "stop_token_ids": list(engine._stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": engine._target.salt,
        }
        for request in requests
    ]
    headers = {"Authorization": f"Bearer {replica.server.key}"}
    at_once = engine._config.max_in_flight // requests[0].num_samples
    return asyncio.run(post_all(replica.client.url, headers, bodies, at_once))


async def post_all(url: str, headers: dict[str, str], bodies: list[dict[str, Any]], at_once: int) -> int:
    gate = asyncio.Semaphore(max(1, at_once))
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=3600, limits=limits) as http:

        async def post(body: dict[str, Any]) -> int:
            async with gate:
                answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            return sum(len(choice["token_ids"]) for choice in answer["choices"])

        return sum(await asyncio.gather(*map(post, bodies)))
