"""That processes which make one run together were started with the same configuration, and share its directory."""

import secrets
import time
from pathlib import Path

from sgpo_jax import strict_yaml
from sgpo_jax.config import Config, parse_config
from sgpo_jax.files import write_text
from sgpo_jax.hosts.messages import await_ready, has_started, lead, num_processes, receive, say_ready
from sgpo_jax.types import UserError

_OWN = ("hosts.", "mesh.devices", "vllm.host", "vllm.port", "vllm.devices", "vllm.weights_dir", "telemetry.")
_TOKEN = ".hosts"  # a file of the run directory
_PATIENCE_S = 10.0  # a network's file system shows a new file late


def lead_run(config: Config) -> None:
    """Say what this run is to the processes that follow, if there are any.

    Raises UserError where the configuration is for several processes and this one has joined no others.
    """
    if config.hosts.num_processes != 1 and not has_started():
        raise UserError(
            f"hosts.num_processes={config.hosts.num_processes}: here a run has one process; the commands run, profile, "
            "plan, train and evaluate join several"
        )
    if num_processes() == 1:
        return
    token = secrets.token_hex(8)
    write_text(Path(config.run_dir) / _TOKEN, token)
    lead("run", {"config": config.model_dump(mode="json"), "token": token})
    await_ready(config.hosts.start_timeout_s)  # while JAX starts on its devices, no failure of theirs would be heard


def follow_run(config: Config) -> None:
    """Raises UserError where process 0 has another configuration, or the run directory is not the same."""
    message = receive("run")
    theirs = parse_config(message.values["config"], "the configuration of process 0")
    differences = [text for key, text in strict_yaml.differences(theirs, config).items() if not key.startswith(_OWN)]
    if differences:
        raise UserError(f"another configuration than that of process 0 ({'; '.join(differences)}); start both alike")
    path, end = Path(config.run_dir) / _TOKEN, time.monotonic() + _PATIENCE_S
    while not path.exists() or path.read_text() != message.values["token"]:
        if time.monotonic() > end:
            raise UserError(
                f"run_dir={config.run_dir}: not the directory that process 0 has under this name; name one that all "
                "hosts share, since each of them writes its part of the checkpoints"
            )
        time.sleep(0.2)
    say_ready()
