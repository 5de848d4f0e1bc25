"""Which implementation of attention a model uses on this machine."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.attention.packed import Implementation, packed_attention
from sgpo_jax.types import UserError

_PLATFORMS: dict[Implementation, str] = {"cudnn": "gpu", "tokamax": "gpu", "splash": "tpu"}

# tokamax is in no such list: nothing measured yet says that it wins.
_AUTOMATIC: tuple[Implementation, ...] = ("cudnn", "splash")

_NEEDS: dict[Implementation, str] = {
    "cudnn": "cudnn needs an NVIDIA GPU (Ampere or later) with cuDNN, and model.compute_dtype=bfloat16",
    "tokamax": "tokamax needs an NVIDIA GPU (Ampere or later), and the package: pip install 'sgpo-jax[tokamax]'",
    "splash": "splash needs a TPU",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """reason: why this one, for the log."""

    implementation: Implementation
    reason: str


def choose_attention(
    wanted: Literal["auto"] | Implementation, arch: Architecture, compute_dtype: jax.typing.DTypeLike
) -> Choice:
    """What model.attention means for this model on the devices of this process. Compiles nothing.

    auto: cudnn on GPUs, splash on TPUs, where they take the model's head size and type; else plain. Raises UserError
    where another one is named and cannot run here: it is never replaced.
    """
    if wanted == "auto":
        return _automatic(arch, compute_dtype)
    refusal = None if wanted == "plain" else _refusal(wanted, arch, compute_dtype)
    if refusal:
        raise UserError(
            f"model.attention={wanted} cannot run here: {refusal}; {_NEEDS[wanted]}; "
            f"model.attention=auto takes {_automatic(arch, compute_dtype).implementation} here"
        )
    return Choice(wanted, "as model.attention names it")


def _automatic(arch: Architecture, compute_dtype: jax.typing.DTypeLike) -> Choice:
    platform = jax.default_backend()
    for name in _AUTOMATIC:
        if _PLATFORMS[name] == platform:
            refusal = _refusal(name, arch, compute_dtype)
            if refusal:
                return Choice("plain", f"auto, on {platform}: {name} cannot: {refusal}; {_NEEDS[name]}")
            return Choice(name, f"auto, on {platform}")
    return Choice("plain", f"auto, on {platform}")


def _refusal(name: Implementation, arch: Architecture, compute_dtype: jax.typing.DTypeLike) -> str | None:
    """Why the implementation does not take heads of this model on this machine; None where it does.

    It is asked itself: tracing a row with its gradient runs its own checks, which know its limits better than a copy of
    them here would.
    """
    if _PLATFORMS[name] != jax.default_backend():
        return f"JAX runs on {jax.default_backend()}"

    def heads(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 128, count, arch.head_dim), compute_dtype)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        return jnp.sum(packed_attention(name, segment_ids)(q, k, v).astype(jnp.float32))

    segment_ids = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    kv = heads(arch.num_kv_heads)
    try:
        jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), heads(arch.num_heads), kv, kv, segment_ids)
    except ExceptionGroup as group:  # of tokamax: one for each of its kernels
        return "; ".join(_one_line(error) for error in group.exceptions)
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        return _one_line(error)
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
