"""What a model looks like, read from the config.json of a Hugging Face directory. Imports no JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sgpo_jax.files import read_json
from sgpo_jax.types import UserError

Family = Literal["qwen2", "qwen3", "llama"]


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder-only transformer of the Qwen2, Qwen3 or Llama family.

    qkv_bias, output_bias: the query, key and value projections, and the attention's output projection, have a bias.
    qk_norm: queries and keys are RMS-normalised over the head dimension before the rotary embedding (Qwen3).
    max_positions: positions that the model was made for; nothing here enforces it.
    """

    family: Family
    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    max_positions: int


def read_architecture(model_dir: Path) -> Architecture:
    """The architecture in `model_dir`/config.json.

    Raises UserError, naming file and field, where it is missing, of another family or uses what is not supported.
    """
    if not model_dir.is_dir():
        raise UserError(f"{model_dir}: no such model directory")
    file = model_dir / "config.json"
    fields = _Fields(read_json(file), file)
    fields.require("model_type", get_args(Family))
    fields.require("hidden_act", ("silu",), default="silu")
    fields.require("use_sliding_window", (False, None), default=False)
    fields.require("mlp_bias", (False, None), default=False)
    family: Family = fields["model_type"]
    model_dim, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    attention_bias = family != "qwen2" and bool(fields.get("attention_bias", False))
    arch = Architecture(
        family=family,
        vocab_size=fields["vocab_size"],
        num_layers=fields["num_hidden_layers"],
        model_dim=model_dim,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", num_heads),
        # Left out of the file, Qwen3 means 128; the others split the model dimension.
        head_dim=fields.get("head_dim", 128 if family == "qwen3" else model_dim // num_heads),
        mlp_dim=fields["intermediate_size"],
        rope_theta=_rope_theta(fields),
        rms_norm_eps=fields["rms_norm_eps"],
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        qk_norm=family == "qwen3",
        max_positions=fields["max_position_embeddings"],
    )
    if arch.num_heads % arch.num_kv_heads:
        raise UserError(
            f"{file}: num_key_value_heads={arch.num_kv_heads} does not divide num_attention_heads={num_heads}"
        )
    return arch


class _Fields:
    """The fields of one config.json, with errors that name the file and the field."""

    def __init__(self, raw: Any, file: Path) -> None:
        if not isinstance(raw, dict):
            raise UserError(f"{file}: not a JSON object")
        self._raw = raw
        self._file = file

    def __getitem__(self, name: str) -> Any:
        if self._raw.get(name) is None:
            raise UserError(f"{self._file}: the field {name} is missing")
        return self._raw[name]

    def get(self, name: str, default: Any) -> Any:
        """Null counts as left out, as transformers has it."""
        value = self._raw.get(name)
        return default if value is None else value

    def require(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> None:
        self.require_value(name, self._raw.get(name, default), allowed)

    def require_value(self, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if value not in allowed:
            choices = ", ".join(str(choice) for choice in allowed if choice is not None)
            raise UserError(f"{self._file}: {name}={value!r} is not supported; supported: {choices}")


def _rope_theta(fields: _Fields) -> float:
    """The base of the rotary embedding: in `rope_parameters` (transformers 5) or beside it (before)."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name, {})
        fields.require_value(f"{name}.rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",))
    theta = fields.get("rope_parameters", {}).get("rope_theta")
    return float(fields["rope_theta"] if theta is None else theta)
