"""Architectures of published models by their hub name, as their config.json files have them.

For what can be worked out of a model that is not on this machine; a model that is gets read (`read_architecture`).
"""

from sgpo_jax.models.architecture import Architecture


def _qwen(family: str, **sizes: int | float | bool) -> Architecture:
    """What all Qwen models below have in common."""
    common = {
        "vocab_size": 151936,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "qkv_bias": family == "qwen2",
        "output_bias": False,
        "qk_norm": family == "qwen3",
    }
    return Architecture(family=family, **{**common, **sizes})  # type: ignore[arg-type]


PUBLISHED: dict[str, Architecture] = {
    "Qwen/Qwen2.5-Math-1.5B": _qwen(
        "qwen2",
        num_layers=28,
        model_dim=1536,
        num_heads=12,
        num_kv_heads=2,
        mlp_dim=8960,
        rope_theta=10000.0,
        tie_embeddings=True,
        max_positions=4096,
    ),
    "Qwen/Qwen2.5-Math-7B": _qwen(
        "qwen2",
        vocab_size=152064,
        num_layers=28,
        model_dim=3584,
        num_heads=28,
        num_kv_heads=4,
        mlp_dim=18944,
        rope_theta=10000.0,
        tie_embeddings=False,
        max_positions=4096,
    ),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen(
        "qwen3",
        num_layers=36,
        model_dim=2560,
        num_heads=32,
        num_kv_heads=8,
        mlp_dim=9728,
        rope_theta=5000000.0,
        tie_embeddings=True,
        max_positions=262144,
    ),
}
