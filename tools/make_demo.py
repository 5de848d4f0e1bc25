"""Makes the demo's model and questions: a tiny Qwen2 that has seen noisy demonstrations of the arithmetic task.

    python tools/make_demo.py                                        # what sgpo_jax/demo holds
    python tools/make_demo.py --variant careful --seed 1 --out DIR   # the start of a study of its own

Takes about 7 minutes on two cores. Writes OUT/model (a Hugging Face directory), OUT/train.jsonl and OUT/heldout.jsonl.
A held-out expression is neither shown in a demonstration nor asked in training. On one machine a seed always gives the
same files.
"""

import tempfile
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import arithmetic_task as task
import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer, decoders, models

from sgpo_jax.config import RolloutsConfig
from sgpo_jax.files import write_json, write_jsonl
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.qwen import Transformer, token_logprobs
from sgpo_jax.models.safetensors import export_model
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.types import GroupRequest, Purpose, Query, SamplingParams

Array = jax.Array | np.ndarray

PAD = "<pad>"
VOCABULARY = (PAD, *task.ALPHABET)
PAD_ID, STOP_ID = VOCABULARY.index(PAD), VOCABULARY.index("$")

ARCH = Architecture(
    family="qwen2",
    vocab_size=len(VOCABULARY),
    num_layers=3,
    model_dim=64,
    num_heads=2,  # two heads of 32: the narrowest that vLLM serves on CPU
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=192,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=True,
    output_bias=False,
    qk_norm=False,
    max_positions=64,
)

NUM_TRAIN, NUM_HELD_OUT = 3000, 1000
BATCH_SIZE = 32
ROW_TOKENS = task.MAX_PROMPT_CHARS + task.MAX_COMPLETION_CHARS
REPORT_EVERY = 400  # steps
NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of supervised training; the learning rate falls linearly to a tenth."""

    num_steps: int
    learning_rate: float
    style: task.Style


@dataclass(frozen=True, slots=True)
class Variant:
    stages: tuple[Stage, ...]
    queries: task.QueryMix


_FIRST_STAGE = Stage(num_steps=6400, learning_rate=2e-3, style=task.CAREFUL)
VARIANTS = {
    # Ends in a sloppier style, which training can put right: the demo.
    "sloppy": Variant((_FIRST_STAGE, Stage(400, 1e-3, task.SLOPPY)), task.HARD_WHEN_DEEP),
    # A better start and more questions beyond it, at every depth.
    "careful": Variant((_FIRST_STAGE,), task.HARD_ANYWHERE),
}


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("sgpo_jax/demo"), show_default=True)
@click.option("--variant", type=click.Choice(list(VARIANTS)), default="sloppy", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(out: Path, variant: str, seed: int) -> None:
    if (out / "model").exists():
        raise click.BadParameter(f"{out}/model exists already; remove it or name another directory", param_hint="--out")
    plan = VARIANTS[variant]
    held_out_rng, train_rng, *stage_rngs = np.random.default_rng(seed).spawn(2 + len(plan.stages))
    held_out = task.draw_queries(held_out_rng, plan.queries, NUM_HELD_OUT)
    train = task.draw_queries(train_rng, plan.queries, NUM_TRAIN, exclude=frozenset(held_out))

    print(
        f"variant {variant}, seed {seed}, {num_parameters(ARCH):,} parameters, {len(train)} + {len(held_out)} questions"
    )
    model = Transformer(ARCH, rngs=nnx.Rngs(seed), remat="none")
    for number, (stage, rng) in enumerate(zip(plan.stages, stage_rngs, strict=True), start=1):
        train_stage(model, stage, rng, exclude=frozenset(held_out), title=f"stage {number}")

    write_model(model, out / "model")
    write_jsonl(out / "train.jsonl", map(task.question_row, train))
    write_jsonl(out / "heldout.jsonl", map(task.question_row, held_out))
    print(f"wrote {out}/model, {out}/train.jsonl, {out}/heldout.jsonl")

    print_accuracy("held-out", held_out, count_solved(model, held_out, seed))
    print_profile(count_solved(model, train, seed))


def train_stage(
    model: Transformer, stage: Stage, rng: np.random.Generator, *, exclude: Set[task.Expression], title: str
) -> None:
    """Minimise the mean negative log-likelihood of the demonstrations' tokens; changes the model in place."""
    schedule = optax.linear_schedule(stage.learning_rate, 0.1 * stage.learning_rate, stage.num_steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, b2=0.98, weight_decay=0.01), wrt=nnx.Param)
    demonstrations = task.draw_demonstrations(rng, stage.style, exclude=exclude)
    begun, losses = time.monotonic(), []
    for step in range(1, stage.num_steps + 1):
        losses.append(train_step(model, optimizer, *encode(islice(demonstrations, BATCH_SIZE))))
        if step % REPORT_EVERY == 0 or step == stage.num_steps:
            seconds = time.monotonic() - begun
            loss = np.mean(losses[-REPORT_EVERY:])
            print(f"{title}: step {step}, loss {loss:.3f} nats a token, {seconds:.0f} s", flush=True)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, token_ids_BT: Array, loss_mask_BT: Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(demonstration_loss)(model, token_ids_BT, loss_mask_BT)
    optimizer.update(model, grads)
    return loss


def demonstration_loss(model: Transformer, token_ids_BT: jax.Array, loss_mask_BT: jax.Array) -> jax.Array:
    positions_BT = jnp.broadcast_to(jnp.arange(token_ids_BT.shape[1]), token_ids_BT.shape)
    segment_ids_BT = (token_ids_BT != PAD_ID).astype(jnp.int32)  # demonstrations hold no padding of their own
    logprobs_BT = token_logprobs(
        model, token_ids_BT, positions_BT, segment_ids_BT, temperature=1.0, chunk_tokens=token_ids_BT.size
    ).logprobs_BT
    return -jnp.sum(logprobs_BT, where=loss_mask_BT) / jnp.sum(loss_mask_BT)


def encode(demonstrations: Iterable[tuple[task.Expression, str]]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and loss mask, both [B, T]: question and demonstration, then padding; the demonstration is learnt."""
    token_ids_BT = np.full((BATCH_SIZE, ROW_TOKENS), PAD_ID, np.int32)
    loss_mask_BT = np.zeros((BATCH_SIZE, ROW_TOKENS), bool)
    for row, (expression, demonstration) in enumerate(demonstrations):
        ids = token_ids(expression.question + demonstration)
        token_ids_BT[row, : len(ids)] = ids
        loss_mask_BT[row, len(expression.question) : len(ids)] = True
    return token_ids_BT, loss_mask_BT


def token_ids(text: str) -> tuple[int, ...]:
    return tuple(VOCABULARY.index(character) for character in text)


def write_model(model: Transformer, out: Path) -> None:
    """A Hugging Face directory in float32; export_model takes what is not weights from a directory that has it."""
    with tempfile.TemporaryDirectory() as directory:
        write_configuration(Path(directory))
        write_tokenizer(Path(directory))
        export_model(model, ARCH, Path(directory), out, dtype=jnp.float32, max_shard_bytes=10**9)


def write_configuration(directory: Path) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": ARCH.family,
        "vocab_size": ARCH.vocab_size,
        "num_hidden_layers": ARCH.num_layers,
        "hidden_size": ARCH.model_dim,
        "num_attention_heads": ARCH.num_heads,
        "num_key_value_heads": ARCH.num_kv_heads,
        "intermediate_size": ARCH.mlp_dim,
        "rope_theta": ARCH.rope_theta,
        "rms_norm_eps": ARCH.rms_norm_eps,
        "tie_word_embeddings": ARCH.tie_embeddings,
        "max_position_embeddings": ARCH.max_positions,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "pad_token_id": PAD_ID,
        "eos_token_id": STOP_ID,
        "bos_token_id": None,
    }
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"eos_token_id": STOP_ID, "pad_token_id": PAD_ID})


def write_tokenizer(directory: Path) -> None:
    """A token a character. "$" ends a completion and is part of its text: an ordinary token, which decoding keeps.

    That it ends one is therefore said in config.json and generation_config.json, not here. Special tokens that
    tokenizer_config.json left out would be Qwen2's, beyond the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCABULARY)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "pad_token": PAD,
        "eos_token": None,
        "unk_token": None,
        "model_max_length": ARCH.max_positions,
    }
    write_json(directory / "tokenizer_config.json", settings)


def count_solved(model: Transformer, expressions: Sequence[task.Expression], seed: int) -> np.ndarray:
    """How many of NUM_SAMPLES completions at temperature 1 solve each expression."""
    engine = JaxEngine(
        model,
        stop_ids=[STOP_ID],
        max_prompt_tokens=task.MAX_PROMPT_CHARS,
        config=RolloutsConfig(max_completion_tokens=task.MAX_COMPLETION_CHARS, batch_size=256),
        run_seed=seed,
    )
    by_question = {expression.question: i for i, expression in enumerate(expressions)}
    requests = [GroupRequest(as_query(expression), NUM_SAMPLES, Purpose.EVALUATE) for expression in expressions]
    num_solved = np.zeros(len(expressions), int)
    for group in engine.generate(requests, SamplingParams(task.MAX_COMPLETION_CHARS)):
        index = by_question[group.request.query.question]
        texts = ["".join(VOCABULARY[token] for token in c.token_ids_C) for c in group.completions]
        num_solved[index] = sum(task.is_solved(expressions[index], text) for text in texts)
    return num_solved


def as_query(expression: task.Expression) -> Query:
    question = expression.question
    return Query(
        query_id=question,
        question=question,
        gold=str(expression.answer),
        kind="exact",
        source="arithmetic",
        prompt=question,
        prompt_ids=token_ids(question),
    )


def print_accuracy(name: str, expressions: Sequence[task.Expression], num_solved: np.ndarray) -> None:
    """At temperature 1: of all, and by depth of known and of hard expressions."""
    print(f"{name}: accuracy {num_solved.mean() / NUM_SAMPLES:.3f} at temperature 1, {NUM_SAMPLES} samples a question")
    for is_hard in (False, True):
        shares = []
        for depth in range(1, task.MAX_DEPTH + 1):
            chosen = [e.is_hard == is_hard and e.depth == depth for e in expressions]
            if any(chosen):
                shares.append(f"{depth}: {num_solved[chosen].mean() / NUM_SAMPLES:.2f}")
        print(f"  {'hard' if is_hard else 'known'}, by depth  {'  '.join(shares)}")


def print_profile(num_solved: np.ndarray) -> None:
    """How many questions were solved k of NUM_SAMPLES times."""
    counts = np.bincount(num_solved, minlength=NUM_SAMPLES + 1)
    print(f"train: questions solved 0..{NUM_SAMPLES} times of {NUM_SAMPLES}: {' '.join(map(str, counts))}")


if __name__ == "__main__":
    main()
