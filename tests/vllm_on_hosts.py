"""One of two processes with a fake vLLM server each, as two hosts would have. Run by test_hosts_vllm.py:

    python vllm_on_hosts.py PROCESS_ID PORT DIRECTORY

Process 0 writes what it saw to DIRECTORY/seen.json.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from flax import nnx
from helpers import make_config, make_query, tiny_architecture, tiny_model
from jax.sharding import NamedSharding
from vllm_helpers import FAKE, LONGEST_PROMPT, STOP, ask_fake, bigram_probe, model_dir

from sgpo_jax.files import write_json
from sgpo_jax.followers import Follower
from sgpo_jax.hosts.messages import STOP as STOP_FOLLOWING
from sgpo_jax.hosts.messages import follow, is_leader, lead, start
from sgpo_jax.models.sharding import make_mesh, param_shardings, put
from sgpo_jax.rollouts.engine import Probe
from sgpo_jax.rollouts.vllm_engine import VLLMEngine, make_vllm_engine
from sgpo_jax.types import GroupRequest, Purpose, SamplingParams


def spread(sharding: NamedSharding, weight: Any) -> Any:
    return jax.tree.map(lambda array: put(array, sharding), weight)


def drive(engine: VLLMEngine, params: nnx.State, probe: Probe) -> dict[str, Any]:
    """Two syncs and two rounds of completions; in the second one the other process's server dies once."""
    urls = [replica.client.url for replica in engine._replicas]
    requests = [GroupRequest(make_query(f"q{i}", (1, 2)), 4, Purpose.TRAIN) for i in range(8)]
    sampling = SamplingParams(12)

    def generate() -> list[list[str | None]]:
        return [[c.error for c in group.completions] for group in engine.generate(requests, sampling)]

    seen: dict[str, Any] = {"first": [ask_fake(url) for url in urls]}
    seen["sync"] = dict(engine.update_weights(params, 1, probe))
    seen["errors"] = generate()
    seen["second"] = [ask_fake(url) for url in urls]
    seen["files"] = [
        sorted(path.name for path in Path(fake["weights"]).parent.glob("weights-*")) for fake in seen["second"]
    ]
    ask_fake(urls[1], die_completion=1)
    seen["errors again"] = generate()
    seen["third"] = [ask_fake(url) for url in urls]
    return seen


def main(number: int, port: str, directory: Path) -> None:
    config = make_config(
        run_dir=str(directory),
        seed=7,
        hosts={"num_processes": 2, "process_id": number, "coordinator": f"127.0.0.1:{port}"},
        rollouts={"engine": "vllm", "max_completion_tokens": 12},
        vllm={"command": FAKE, "platform": "cpu", "start_time_limit_s": 60.0, "max_in_flight": 16},
    )
    start(config.hosts)
    arch, mesh, model = tiny_architecture(), make_mesh(config.mesh), tiny_model()
    probe = bigram_probe(model)
    with jax.set_mesh(mesh):
        # Spread over both processes: neither has the whole of it.
        params = jax.tree.map(spread, param_shardings(arch, mesh), nnx.state(model))
        assert not any(leaf.is_fully_addressable for leaf in jax.tree.leaves(params))
        source = model_dir(directory / f"model-{number}")
        run: Any = SimpleNamespace(config=config, arch=arch, model_dir=source, dir=directory, params=params)
        if not is_leader():
            follower = Follower(run)
            try:
                follow(follower)
            finally:
                follower.close()
            return
        lead("model")
        engine = make_vllm_engine(
            config,
            arch,
            source,
            stop_ids=[STOP],
            longest_prompt=LONGEST_PROMPT,
            log=directory / "vllm.log",
            initial=params,
            probe=probe,
        )
        try:
            write_json(directory / "seen.json", drive(engine, params, probe))
        finally:
            engine.close()
        lead(STOP_FOLLOWING)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
