"""The one table of weights. It drives initialisation, sharding, loading and export; only it knows tensors' names."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sgpo_jax.models.architecture import Architecture


@dataclass(frozen=True)
class Weight:
    """One parameter of the Transformer, and the Hugging Face tensor or tensors that it comes from.

    path: attribute names inside the module.
    shape, axes: size and logical axis name of each dimension; those of all layers are stacked along a leading "layers".
    hf_name: tensor name in a checkpoint, with {layer} where one tensor a layer is stacked.
    transpose: the checkpoint's matrix is [out, in], ours [in, out].
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_name: str
    init: Literal["normal", "zeros", "ones"]
    transpose: bool = False

    @property
    def is_stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def is_matrix(self) -> bool:
        """Whether it maps vectors to vectors (and is decayed), unlike norms and biases."""
        return len(self.shape) - self.is_stacked == 2

    @property
    def num_tensors(self) -> int:
        return self.shape[0] if self.is_stacked else 1

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of each tensor in the checkpoint."""
        shape = self.shape[1:] if self.is_stacked else self.shape
        return shape[::-1] if self.transpose else shape


def weight_table(arch: Architecture) -> tuple[Weight, ...]:
    """Every parameter of a model, in the order of a Hugging Face checkpoint. A tied lm_head is not in it.

    Heads stay flat (N*H, K*H): a mesh axis that divides the number of heads splits them between heads.
    """
    model, heads = arch.model_dim, arch.num_heads * arch.head_dim
    kv_heads = arch.num_kv_heads * arch.head_dim
    attention = [
        _matrix("q_proj", arch, (model, heads), ("embed", "heads")),
        _matrix("k_proj", arch, (model, kv_heads), ("embed", "kv_heads")),
        _matrix("v_proj", arch, (model, kv_heads), ("embed", "kv_heads")),
        _matrix("o_proj", arch, (heads, model), ("heads", "embed")),
    ]
    if arch.qkv_bias:
        attention.append(_bias("q_proj", arch, heads, "heads"))
        attention.append(_bias("k_proj", arch, kv_heads, "kv_heads"))
        attention.append(_bias("v_proj", arch, kv_heads, "kv_heads"))
    if arch.output_bias:
        attention.append(_bias("o_proj", arch, model, "model"))
    if arch.qk_norm:
        attention.append(_norm("q_norm", arch, arch.head_dim, "head", "self_attn.q_norm"))
        attention.append(_norm("k_norm", arch, arch.head_dim, "head", "self_attn.k_norm"))
    mlp = [
        _matrix("gate_proj", arch, (model, arch.mlp_dim), ("embed", "mlp")),
        _matrix("up_proj", arch, (model, arch.mlp_dim), ("embed", "mlp")),
        _matrix("down_proj", arch, (arch.mlp_dim, model), ("mlp", "embed")),
    ]
    vocabulary = (arch.vocab_size, model), ("vocab", "embed")
    return (
        Weight(("embedding",), *vocabulary, "model.embed_tokens.weight", "normal"),
        _norm("attention_norm", arch, model, "model", "input_layernorm"),
        *attention,
        _norm("mlp_norm", arch, model, "model", "post_attention_layernorm"),
        *mlp,
        Weight(("final_norm",), (model,), ("model",), "model.norm.weight", "ones"),
        *(() if arch.tie_embeddings else (Weight(("lm_head",), *vocabulary, "lm_head.weight", "normal"),)),
    )


def weight_tree(arch: Architecture, value_of: Callable[[Weight], Any]) -> dict[str, Any]:
    """A nested dictionary, shaped as the Transformer's parameters, of `value_of` each weight."""
    tree: dict[str, Any] = {}
    for weight in weight_table(arch):
        *parents, name = weight.path
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value_of(weight)
    return tree


def num_parameters(arch: Architecture) -> int:
    """All parameters, embeddings included; tied ones counted once."""
    return sum(math.prod(weight.shape) for weight in weight_table(arch))


def _matrix(name: str, arch: Architecture, shape: tuple[int, int], axes: tuple[str, str]) -> Weight:
    block = "self_attn" if {"heads", "kv_heads"} & set(axes) else "mlp"
    hf_name = f"model.layers.{{layer}}.{block}.{name}.weight"
    return Weight(("layers", name), (arch.num_layers, *shape), ("layers", *axes), hf_name, "normal", transpose=True)


def _bias(name: str, arch: Architecture, size: int, axis: str) -> Weight:
    hf_name = f"model.layers.{{layer}}.self_attn.{name}.bias"
    return Weight(("layers", f"{name}_bias"), (arch.num_layers, size), ("layers", axis), hf_name, "zeros")


def _norm(name: str, arch: Architecture, size: int, axis: str, hf_name: str) -> Weight:
    hf_name = f"model.layers.{{layer}}.{hf_name}.weight"
    return Weight(("layers", name), (arch.num_layers, size), ("layers", axis), hf_name, "ones")
