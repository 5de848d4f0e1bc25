"""FLOPs of matrix products, counted in a jaxpr with the trip counts of its loops.

XLA's own cost analysis counts the body of a loop once, and a model whose layers are scanned has nearly all of its work
in one. Element-wise work is left out, as in every figure that is held against 6P.
"""

import math
from typing import Any

import jax
import jax.extend

# Kernels whose work no jaxpr shows. They have to be traced in their plain form.
_OPAQUE = ("pallas_call", "dot_product_attention", "ffi_call", "custom_partitioning")


def matmul_flops(jaxpr: Any, while_trips: int = 1) -> int:
    """FLOPs (2 for a product and a sum) of one call, over all devices together.

    jaxpr: a jax.extend.core.Jaxpr or ClosedJaxpr. while_trips: rounds of loops whose number of rounds is data. Of
    several branches, the dearest counts. Raises NotImplementedError for a kernel that hides what it computes.
    """
    return sum(_flops(equation, while_trips) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _flops(equation: Any, while_trips: int) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    if name.startswith(_OPAQUE):
        raise NotImplementedError(f"FLOPs of {name} cannot be counted; trace the program with plain attention")
    inner = [matmul_flops(jaxpr, while_trips) for jaxpr in jax.extend.core.jaxprs_in_params(params)]
    match name:
        case "scan":
            return int(params["length"]) * sum(inner)
        case "while":
            return while_trips * sum(inner)
        case "cond":
            return max(inner)
        case "shard_map":  # its body is one device's
            return int(params["mesh"].size) * sum(inner)
    return sum(inner)


def _dot_flops(equation: Any) -> int:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracting)


def _convolution_flops(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    num_outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // num_outputs
