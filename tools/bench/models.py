"""The models of the benchmarks: Qwen2 at several sizes, with random weights, as Hugging Face directories."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from sgpo_jax.files import write_json
from sgpo_jax.models.architecture import Architecture, read_architecture
from sgpo_jax.models.safetensors import tensor_shapes, write_tensors


def qwen2(vocab: int, layers: int, dim: int, heads: int, kv_heads: int, mlp: int, *, tied: bool = True) -> dict:
    """A config.json."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": vocab,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


MODELS = {
    "toy": qwen2(256, 2, 64, 4, 2, 128),
    "30m": qwen2(8_192, 8, 512, 8, 4, 1_536),
    "0.5b": qwen2(151_936, 24, 896, 14, 2, 4_864),  # Qwen2.5-0.5B
}


def make_model(config: dict, directory: Path, *, max_shard_bytes: int = 5 * 10**9, std: float = 0.02) -> Architecture:
    """Write a model of this config.json with normal bfloat16 weights; norms are 1 and biases as small as the rest."""
    source = directory.with_name(f"{directory.name}-config")
    write_json(source / "config.json", config)
    arch = read_architecture(source)
    shapes = tensor_shapes(arch)
    rng = np.random.default_rng(0)

    def read(names: Sequence[str]) -> Iterator[np.ndarray]:
        for name in names:
            values = rng.standard_normal(shapes[name], np.float32) * std
            yield (values + 1 if "norm" in name else values).astype(ml_dtypes.bfloat16)

    write_tensors(read, source, directory, dtype="bfloat16", max_shard_bytes=max_shard_bytes)
    return arch
