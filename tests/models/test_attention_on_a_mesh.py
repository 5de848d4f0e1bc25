"""On a mesh every device computes its own rows and heads. In a subprocess, since devices are made at start-up."""

import os
import subprocess
import sys

ON_FOUR_DEVICES = """
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention
from sgpo_jax.config import MeshConfig
from sgpo_jax.models.attention import packed_attention
from sgpo_jax.models.sharding import constrain, make_mesh
import jax._src.cudnn.fused_attention_stablehlo as cudnn

splash_attention.make_splash_mha = partial(splash_attention.make_splash_mha, interpret=True)
cudnn.check_cudnn_version = lambda: 91000
mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
rng = np.random.default_rng(0)


def total(name, q, k, v, segment_ids):
    q, k, v = (constrain(x, ("batch", "length", "heads", "head")) for x in (q, k, v))
    y = packed_attention(name, segment_ids)(q, k, v)
    return jnp.sum(jnp.sin(y.astype(jnp.float32)) * (segment_ids > 0)[..., None, None])


for num_rows in 4, 3:  # the devices cannot share 3 rows evenly
    q, k, v = (rng.normal(size=(num_rows, 128, n, 8)).astype(np.float32) for n in (4, 2, 2))
    segment_ids = np.repeat(rng.permuted(np.tile([1, 1, 2, 0], (num_rows, 1)), axis=1), 32, axis=1)
    gradient = lambda name: jax.jit(jax.grad(partial(total, name), argnums=(0, 1, 2)))
    alone = gradient("plain")(q, k, v, segment_ids)
    with jax.set_mesh(mesh):
        spread = gradient("splash")(q, k, v, segment_ids)
    for one, other in zip(alone, spread, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert num_rows == 3 or other.sharding.shard_shape(other.shape)[::2] == (2, other.shape[2] // 2)

shapes = [jax.ShapeDtypeStruct((4, 128, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
segment_ids = jax.ShapeDtypeStruct((4, 128), jnp.int32)
with jax.set_mesh(mesh):
    text = gradient("cudnn").trace(*shapes, segment_ids).lower(lowering_platforms=("cuda",)).as_text()
calls = [line.split("operand_layouts")[1] for line in text.splitlines() if "__cudnn$fmha" in line]
assert len(calls) == 2
assert all("tensor<2x128x2x64xbf16>, tensor<2x128x1x64xbf16>" in call for call in calls), calls
print("ALL EQUAL")
"""


def test_each_device_computes_its_own_rows_and_heads():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_FOUR_DEVICES]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert finished.stdout.endswith("ALL EQUAL\n"), finished.stderr[-3000:]
