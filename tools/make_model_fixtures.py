"""Makes tests/fixtures/models: tiny random models, each with the logits that transformers gives for it.

python tools/make_model_fixtures.py        (needs torch and transformers; the results are committed)
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

FIXTURES = Path(__file__).resolve().parent.parent / "tests/fixtures/models"
SEED = 20260608

COMMON = {
    "vocab_size": 68,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,  # large enough for attention and logits to be far from uniform
    "attn_implementation": "eager",
}
MODELS = {
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2_untied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False, "rope_theta": 1e4}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "head_dim": 8, "rope_theta": 1e6}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False, "rope_theta": 5e5}),
    "llama_bias": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True}),
}


def main() -> None:
    for name, (model_class, config_class, options) in MODELS.items():
        torch.manual_seed(SEED)
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": options.pop("rope_theta", 1e4)}}
        model = model_class(config_class(**COMMON, **options, **rope)).eval()
        randomise_vectors(model)
        model.save_pretrained(FIXTURES / name)
        np.savez_compressed(FIXTURES / name / "reference.npz", **reference(model))


def randomise_vectors(model: torch.nn.Module) -> None:
    """Fresh biases are 0 and norms 1: a reader that forgot them would go unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))


def reference(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Token ids [B, T] and logits [B, T, V] (float32) of two rows: as they are, right-padded and left-padded."""
    ids_BT = np.random.default_rng(SEED).integers(0, COMMON["vocab_size"], (2, 10))
    right_BT = np.arange(10) < np.array([[10], [6]])
    found = {"token_ids": ids_BT.astype(np.int32), "right_mask": right_BT, "left_mask": right_BT[:, ::-1]}
    for name, mask_BT in {"whole": np.ones_like(right_BT), "right": right_BT, "left": right_BT[:, ::-1]}.items():
        positions_BT = np.maximum(np.cumsum(mask_BT, axis=1) - 1, 0)
        with torch.no_grad():
            output = model(
                torch.tensor(ids_BT),
                attention_mask=torch.tensor(mask_BT.astype(np.int64)),
                position_ids=torch.tensor(positions_BT),
            )
        found[f"{name}_logits"] = output.logits.numpy().astype(np.float32)
    return found


if __name__ == "__main__":
    main()
