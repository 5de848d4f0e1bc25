"""The vLLM engine: servers beside the trainer that are fed, given new weights, watched, and started again.

All HTTP runs in one event loop on a thread of its own; what callers see is blocking.
"""

import asyncio
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from sgpo_jax.config import Config, VLLMConfig
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.rollouts.engine import Probe, sample_seed
from sgpo_jax.rollouts.vllm_client import (
    Choice,
    CompletionCall,
    NoAnswerError,
    RequestRefusedError,
    ServerError,
    VLLMClient,
)
from sgpo_jax.rollouts.vllm_hosts import remote_servers
from sgpo_jax.rollouts.vllm_server import Server, VLLMServer, shared_key
from sgpo_jax.rollouts.vllm_weights import WeightsDirectory
from sgpo_jax.telemetry import say
from sgpo_jax.types import (
    Completion,
    CompletionGroup,
    FinishReason,
    GroupRequest,
    MachineError,
    SamplingParams,
    UserError,
)

_POLL_S = 0.25
_BACKOFF_S = 0.5  # before the second attempt; doubled for each further one
_SEED_BITS = 62  # seed + sample index stays below 2^63
# Of probes, largest and mean; old or wrong weights are off by several nats. In bfloat16 rounding alone moves single
# log-probs of a real model by half a nat, their mean by hundredths.
_MAX_GAPS = {"float32": 1e-4, "bfloat16": 2.0}
_MEAN_GAPS = {"float32": 1e-4, "bfloat16": 0.1}


@dataclass(frozen=True, slots=True)
class _Target:
    """The weights that every server must have."""

    directory: Path
    version: int
    probe: Probe

    @property
    def salt(self) -> str:
        return self.directory.name


class _Strikes:
    """Failures in a row, and how many of them are too many."""

    def __init__(self, limit: int, of_what: str) -> None:
        self._limit = limit
        self._of_what = of_what
        self._in_row = 0
        self.total = 0

    def add(self, error: MachineError) -> None:
        """Raises MachineError at the limit."""
        self._in_row += 1
        self.total += 1
        if self._in_row >= self._limit:
            raise MachineError(
                f"vLLM: {self._in_row} failures of {self._of_what} in a row (vllm.max_failures), the last: {error}. "
                "The same command resumes the run"
            )
        say(f"vllm: {error} (failure {self._in_row} of {self._limit})")

    def reset(self) -> None:
        self._in_row = 0


@dataclass
class _Replica:
    """A server and what this engine knows of it. generation: how often it was started or taken up again."""

    client: VLLMClient
    server: Server | None
    num_in_flight: int = 0
    generation: int = 0
    probe_gap: float = 0.0  # largest, at the newest comparison
    probe_mean_gap: float = 0.0
    is_asleep: bool = False
    is_ended: bool = False  # by this engine, since it would not sleep
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def make_vllm_engine(
    config: Config,
    arch: Architecture,
    model_dir: Path,
    *,
    stop_ids: Sequence[int],
    longest_prompt: int,
    log: Path,
    initial: nnx.State,
    probe: Probe | None,
) -> "VLLMEngine":
    """The engine of a configuration, with its servers up and the weights `initial` on them.

    longest_prompt: in tokens. log: where a server of the run's own writes.
    Raises UserError where the model is too short for the requests or a server cannot be used as configured, and
    MachineError where one does not come up.
    """
    longest_completion = max(config.rollouts.max_completion_tokens, 2)  # a probe's prompt has one token more
    max_model_len = longest_prompt + longest_completion
    if max_model_len > arch.max_positions:
        raise UserError(
            f"{model_dir}: made for {arch.max_positions} tokens, but the longest prompt has {longest_prompt} and a "
            f"completion up to {longest_completion}; lower data.max_prompt_tokens or rollouts.max_completion_tokens"
        )
    options = config.vllm
    dtype = config.model.compute_dtype
    parent = Path(options.weights_dir).absolute() if options.weights_dir is not None else None
    weights = WeightsDirectory(arch, model_dir, dtype, parent)
    if options.urls:
        key = os.environ.get("VLLM_API_KEY", "")
        replicas = [_Replica(VLLMClient(url, key), None) for url in options.urls]
    else:
        key = shared_key(options)
        own = VLLMServer(options, dtype=dtype, max_model_len=max_model_len, scratch=weights.path, log=log, key=key)
        servers: list[Server] = [own, *remote_servers(max_model_len, options.sync_time_limit_s)]
        replicas = [_Replica(VLLMClient(server.url, key or own.key), server) for server in servers]
    engine = VLLMEngine(
        options,
        weights,
        replicas,
        stop_ids=stop_ids,
        max_model_len=max_model_len,
        max_gap=options.probe_max_gap or _MAX_GAPS[dtype],
        mean_gap=options.probe_mean_gap or _MEAN_GAPS[dtype],
        run_seed=config.seed,
    )
    try:
        engine.update_weights(initial, 0, probe)
    except BaseException:
        engine.close()
        raise
    return engine


class VLLMEngine:
    """Samples from vLLM servers: one that it starts and ends (one for each of several processes), or those of
    vllm.urls.

    weights: where new weights are written for them; closed with the engine. stop_ids: token ids that end a completion.
    max_model_len: of the model; longer requests are refused before they are sent. max_gap, mean_gap: see
    vllm.probe_max_gap and vllm.probe_mean_gap.
    """

    def __init__(
        self,
        config: VLLMConfig,
        weights: WeightsDirectory,
        replicas: Sequence[_Replica],
        *,
        stop_ids: Sequence[int],
        max_model_len: int,
        max_gap: float,
        mean_gap: float,
        run_seed: int,
    ) -> None:
        self._config = config
        self._weights = weights
        self._replicas = replicas
        self._stop_ids = tuple(sorted(stop_ids))
        self._max_model_len = max_model_len
        self._max_gap = max_gap
        self._mean_gap = mean_gap
        self._run_seed = run_seed
        self._target: _Target | None = None
        self._server_strikes = _Strikes(config.max_failures, "the server")
        self._sync_strikes = _Strikes(config.max_failures, "a sync")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    def update_weights(self, params: nnx.State, version: int, probe: Probe | None) -> Mapping[str, float]:
        """Write the weights, have every server load them, compare the probe. The first call starts the servers.

        A server that fails is started again with these weights. Raises MachineError after vllm.max_failures failures in
        a row, UserError where a server cannot be started with this configuration.
        """
        assert probe is not None, "servers have their weights from a copy"
        started, before = time.monotonic(), self._num_failures
        directory = self._weights.write(params)
        written = time.monotonic()
        self._target = _Target(directory, version, probe)
        self._run(self._sync_all())
        self._weights.keep_only(directory)
        return {
            "seconds/sync_write": written - started,
            "seconds/sync_load": time.monotonic() - written,
            "sync/probe_gap": max(replica.probe_gap for replica in self._replicas),
            "sync/probe_mean_gap": max(replica.probe_mean_gap for replica in self._replicas),
            "sync/num_failures": self._num_failures - before,
        }

    def generate(self, requests: Sequence[GroupRequest], sampling: SamplingParams) -> Iterator[CompletionGroup]:
        """Give every request's group as it finishes. A group that failed for good has completions with an error.

        Raises UserError for a prompt that is empty or does not fit, before anything is sent; MachineError where the
        servers keep failing.
        """
        for request in requests:
            self._check(request, sampling)
        found: queue.SimpleQueue[CompletionGroup] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._generate(requests, sampling, found), self._loop)
        try:
            for _ in requests:
                while True:
                    try:
                        group = found.get(timeout=_POLL_S)
                        break
                    except queue.Empty:
                        if work.done() and found.empty():
                            work.result()
                yield group
        finally:
            work.cancel()

    def sleep(self) -> None:
        """Have the servers give their devices up until `update_weights`; one that cannot is ended, and started there.

        Raises MachineError after vllm.max_failures failures in a row.
        """
        self._run(self._sleep_all())

    def close(self) -> None:
        """End the server that was started, and everything of it."""
        self._run(self._quiesce())
        for replica in self._replicas:
            if replica.server is not None:
                replica.server.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._weights.close()

    @property
    def _num_failures(self) -> int:
        return self._server_strikes.total + self._sync_strikes.total

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where waiting for it was interrupted

    def _check(self, request: GroupRequest, sampling: SamplingParams) -> None:
        length, limit = len(request.query.prompt_ids), self._max_model_len - sampling.max_completion_tokens
        if not 0 < length <= limit:
            raise UserError(
                f"query {request.query.query_id}: a prompt of {length} tokens; allowed are 1 to {limit}, the model's "
                f"{self._max_model_len} less the {sampling.max_completion_tokens} of a completion"
            )

    # What follows runs in the event loop.

    async def _quiesce(self) -> None:
        """End whatever is still going on, such as a start that was interrupted."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_default_executor()
        for replica in self._replicas:
            await replica.client.close()

    async def _generate(
        self, requests: Sequence[GroupRequest], sampling: SamplingParams, found: "queue.SimpleQueue[CompletionGroup]"
    ) -> None:
        """As many requests at once as vllm.max_in_flight samples allow, and one at least."""
        waiting, free = deque(requests), self._config.max_in_flight
        running: dict[asyncio.Task[CompletionGroup], int] = {}
        try:
            while waiting or running:
                while waiting and (not running or waiting[0].num_samples <= free):
                    request = waiting.popleft()
                    free -= request.num_samples
                    running[asyncio.create_task(self._complete(request, sampling))] = request.num_samples
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    free += running.pop(task)
                    found.put(task.result())
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _complete(self, request: GroupRequest, sampling: SamplingParams) -> CompletionGroup:
        """One group, after bounded attempts; sample i of a query draws from the hash of the query's samples plus i."""
        target = self._target
        assert target is not None, "update_weights comes first"
        seed = (sample_seed(self._run_seed, request, 0) >> (63 - _SEED_BITS)) + request.first_sample
        num_draws = request.num_samples if sampling.temperature else 1  # greedy samples are all the same
        call = CompletionCall(request.query.prompt_ids, num_draws, seed, sampling, self._stop_ids)
        error: MachineError | None = None
        for attempt in range(self._config.max_attempts):
            if attempt:
                await asyncio.sleep(_BACKOFF_S * 2 ** (attempt - 1))
            replica = min(self._replicas, key=lambda r: r.num_in_flight)
            generation = replica.generation
            replica.num_in_flight += request.num_samples
            try:
                choices = await replica.client.complete(call, target.salt, self._config.request_time_limit_s)
                self._server_strikes.reset()
                return _group(request, choices * (request.num_samples // num_draws), target.version)
            except RequestRefusedError as refused:
                error = refused
                break
            except ServerError as failed:
                error = failed
                await self._recover(replica, generation, failed)
            finally:
                replica.num_in_flight -= request.num_samples
        say(f"vllm: query {request.query.query_id} has no completions: {error}")
        return _failed_group(request, target.version, str(error))

    async def _sync_all(self) -> None:
        await asyncio.gather(*(self._sync(replica) for replica in self._replicas))

    async def _sleep_all(self) -> None:
        await asyncio.gather(*(self._sleep(replica) for replica in self._replicas))

    async def _sleep(self, replica: _Replica) -> None:
        async with replica.lock:
            try:
                await replica.client.sleep(self._config.sync_time_limit_s)
            except (ServerError, RequestRefusedError) as error:
                self._server_strikes.add(error)
                assert replica.server is not None, "vllm.placement=shared is for a server of the run's own"
                await asyncio.to_thread(replica.server.stop)
                replica.is_ended = True
            else:
                replica.is_asleep = True

    async def _sync(self, replica: _Replica) -> None:
        """Give a server the target's weights: by a start where it is not running yet, else by a reload."""
        async with replica.lock:
            if replica.generation == 0:
                await self._bring_up(replica)
                return
            if replica.is_ended:
                await self._bring_up_again(replica)
                return
            try:
                if replica.is_asleep:
                    await replica.client.wake_up(self._config.sync_time_limit_s)
                    replica.is_asleep = False
                await self._load(replica)
                self._sync_strikes.reset()
            except (ServerError, RequestRefusedError) as error:
                self._sync_strikes.add(error)
                await self._bring_up_again(replica)

    async def _recover(self, replica: _Replica, generation: int, error: ServerError) -> None:
        """After a request failed: start the server again where it is dead or hangs, and nobody did so since then."""
        async with replica.lock:
            if replica.generation != generation:
                return
            if isinstance(error, NoAnswerError) or not await replica.client.is_healthy():
                self._server_strikes.add(error)
                await self._bring_up_again(replica)

    async def _bring_up_again(self, replica: _Replica) -> None:
        """Bring it up until that succeeds. Raises MachineError at the limit of failures in a row."""
        while True:
            try:
                await self._bring_up(replica)
                return
            except MachineError as error:
                self._server_strikes.add(error)

    async def _bring_up(self, replica: _Replica) -> None:
        """Start the server with the target's weights; one that is not ours is waited for, and given them."""
        assert self._target is not None
        began = time.monotonic()
        if replica.server is not None:
            await asyncio.to_thread(replica.server.start, self._target.directory)
            replica.is_asleep = replica.is_ended = False
        await self._wait_until_healthy(replica)
        await replica.client.introduce()
        if replica.client.max_model_len < self._max_model_len:
            raise UserError(
                f"{replica.client.url}: serves up to {replica.client.max_model_len} tokens; this run needs "
                f"{self._max_model_len}: start it with --max-model-len {self._max_model_len}"
            )
        if replica.server is None:
            await self._load(replica)
        else:
            await self._compare(replica)
        replica.generation += 1
        seconds = time.monotonic() - began
        say(
            f"vllm: {replica.client.url} is up after {seconds:.0f} s, probe gap {replica.probe_gap:.1e}, "
            f"{replica.probe_mean_gap:.1e} in the mean"
        )

    async def _wait_until_healthy(self, replica: _Replica) -> None:
        end = time.monotonic() + self._config.start_time_limit_s
        while not await replica.client.is_healthy():
            if replica.server is not None and not replica.server.is_running:
                raise replica.server.failure("ended before it was healthy")
            if time.monotonic() > end:
                what = f"was not healthy within vllm.start_time_limit_s={self._config.start_time_limit_s:g}"
                if replica.server is None:
                    raise MachineError(f"{replica.client.url}: {what}")
                await asyncio.to_thread(replica.server.stop)
                raise replica.server.failure(what)
            await asyncio.sleep(_POLL_S)

    async def _load(self, replica: _Replica) -> None:
        assert self._target is not None
        try:
            directory = self._target.directory
            if replica.server is not None:
                directory = await asyncio.to_thread(replica.server.path_of, directory)
            await replica.client.load_weights(directory, self._config.sync_time_limit_s)
        except RequestRefusedError as error:
            raise ServerError(str(error)) from None
        await self._compare(replica)

    async def _compare(self, replica: _Replica) -> None:
        """Raises ServerError where the server's log-probs are not the trainer's."""
        assert self._target is not None
        probe, gaps = self._target.probe, []
        for token_ids, logprobs in zip(probe.token_ids, probe.logprobs, strict=True):
            found = await replica.client.logprobs(token_ids, self._target.salt, self._config.sync_time_limit_s)
            gaps.append(np.abs(found - logprobs))
        all_gaps = np.concatenate(gaps)
        replica.probe_gap, replica.probe_mean_gap = float(all_gaps.max()), float(all_gaps.mean())
        # NaN fails too.
        if not (replica.probe_gap <= self._max_gap and replica.probe_mean_gap <= self._mean_gap):
            raise ServerError(
                f"{replica.client.url}: after the sync of version {self._target.version} the log-probs of the probe "
                f"are off by up to {replica.probe_gap:.2e}, {replica.probe_mean_gap:.2e} in the mean; allowed are "
                f"{self._max_gap:.0e} (vllm.probe_max_gap) and {self._mean_gap:.0e} (vllm.probe_mean_gap)"
            )


def _group(request: GroupRequest, choices: Sequence[Choice], version: int) -> CompletionGroup:
    numbered = enumerate(choices, start=request.first_sample)
    return CompletionGroup(
        request, tuple(Completion(i, c.token_ids_C, c.logprobs_C, c.finish_reason, version) for i, c in numbered)
    )


def _failed_group(request: GroupRequest, version: int, error: str) -> CompletionGroup:
    empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
    indices = range(request.first_sample, request.first_sample + request.num_samples)
    return CompletionGroup(
        request, tuple(Completion(i, *empty, FinishReason.LENGTH, version, error=error) for i in indices)
    )
