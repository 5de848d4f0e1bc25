"""What a process other than 0 does: its part of every program, when process 0 says so.

It judges nothing, asks no server for completions, and writes nothing into the run directory but its shards of the
checkpoints and the log of its host's server.
"""

import os
from dataclasses import dataclass
from typing import Any

from flax import nnx

from sgpo_jax.checkpoints import abstract_like
from sgpo_jax.config import Config
from sgpo_jax.data.batching import from_arrays
from sgpo_jax.hosts.link import Message
from sgpo_jax.hosts.messages import follow, process_id
from sgpo_jax.models.safetensors import join_export
from sgpo_jax.pipeline import start_training
from sgpo_jax.rollouts.engine import from_values
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.rollouts.placement import check_server, num_gpus
from sgpo_jax.rollouts.probe import Prober
from sgpo_jax.rollouts.vllm_hosts import HostServer
from sgpo_jax.rollouts.vllm_weights import join_write
from sgpo_jax.run import Run, join_run
from sgpo_jax.telemetry import console
from sgpo_jax.training.state import TrainState, restore
from sgpo_jax.training.step import TrainStep
from sgpo_jax.types import SamplingParams


def follow_run(config: Config) -> None:
    """Follow process 0 through a run until it is over, and print nothing. Raises what a part of a program raises."""
    console.quiet = True
    with join_run(config) as run:
        follower = Follower(run)
        try:
            follow(follower)
        finally:
            follower.close()


@dataclass
class _Training:
    step: TrainStep
    state: TrainState
    reference: Any


class Follower:
    """The same arrays as process 0 has, under the same names: the policy is what is trained, from `train` to `trained`,
    else the weights that were loaded or restored last; the reference is what the KL divergence is from.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._weights: nnx.State | None = None
        self._training: _Training | None = None
        self._engine: JaxEngine | None = None
        self._prober: Prober | None = None
        self._server: HostServer | None = None

    @property
    def _policy(self) -> Any:
        return self._weights if self._training is None else self._training.state.params

    def close(self) -> None:
        """End the server, if there is one."""
        if self._server is not None:
            self._server.close()

    def _make_server(self, max_model_len: int) -> HostServer:
        run = self._run
        check_server(run.config.vllm, num_gpus(os.environ))
        log = run.dir / f"vllm-{process_id()}.log"
        return HostServer(run.config, run.arch, run.model_dir, max_model_len, log)

    def __call__(self, message: Message) -> None:
        """Do what a message says. What the parts of `training`, `engine` and `prober` are was said before."""
        run, training, engine, values = self._run, self._training, self._engine, message.values
        match message.op:
            case "model":
                self._weights = run.params
            case "engine":
                self._engine = run.jax_engine(values["stop_ids"], values["max_prompt_tokens"])
            case "weights" if engine:
                engine.update_weights(self._policy, values["version"], None)
            case "generate" if engine:
                for _ in engine.generate(from_values(values["requests"]), SamplingParams(**values["sampling"])):
                    pass
            case "prober":
                chunk_tokens = run.config.model.vocab_chunk_tokens
                self._prober = Prober(run.model, values["prompts"], values["end_id"], chunk_tokens=chunk_tokens)
            case "probe" if self._prober:
                self._prober(self._policy)
            case "train":
                self._training, self._weights = _Training(*start_training(run)), None
            case "logprobs" if training:
                params = training.reference if values["of"] == "reference" else self._policy
                training.step.logprobs(params, from_arrays(message.arrays))
            case "update" if training:
                training.state, _ = training.step.update(
                    training.state, from_arrays(message.arrays), values["learning_rate"]
                )
            case "trained":
                self._training = None
            case "checkpoints":
                _ = run.checkpoints
            case "save" if training:
                run.checkpoints.save(values["step"], training.state.parts, {})
            case "restore" if training and "optimizer" in values["parts"]:
                training.state, _ = restore(run.checkpoints, training.state)
            case "restore":
                abstract = {"params": abstract_like(nnx.state(run.model))}
                self._weights = run.checkpoints.restore(abstract, values["step"]).arrays["params"]
            case "read host values":
                run.checkpoints.host()
            case "wait for checkpoints":
                run.checkpoints.wait()
            case "vllm server":
                self._server = self._make_server(values["max_model_len"])
            case "write weights" if self._server:
                self._server.write(self._policy)
            case "write weights":
                join_write(self._policy, run.arch, run.config.model.compute_dtype)
            case "keep weights":
                if self._server:
                    self._server.keep_only(values["name"])
            case "export":
                join_export(self._policy, run.arch, dtype=run.config.export.dtype)
            case op:
                raise AssertionError(f"the message {op} does not follow what came before")
