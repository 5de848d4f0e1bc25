"""`launch check`: the same command again in a process that has the machine's devices, simulated."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sgpo_jax.types import MachineError

_INSIDE = "SGPO_JAX_CHECK_INSIDE"  # set for the process that has the devices
_LIMIT_S = 3600.0


def check(
    config_file: Path, overrides: Sequence[str], *, num_devices: int | None, as_json: bool, allow_missing: bool
) -> int:
    """The exit code: 0 where everything is ready, 2 where the configuration or what it names is not.

    num_devices: of the trainer, in place of those that the configuration's hardware and placement give it.
    Raises UserError for a configuration that is wrong, and MachineError where the check does not end.
    """
    if _INSIDE in os.environ:
        return _inside(config_file, overrides, num_devices, as_json=as_json, allow_missing=allow_missing)
    from sgpo_jax.check.machine import environment, machine_of
    from sgpo_jax.config import load_config

    machine = machine_of(load_config(config_file, overrides), num_devices)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # looks at what is here, fetches nothing
    options = [f"--devices={num_devices}"] * (num_devices is not None)
    options += ["--json"] * as_json + ["--allow-missing"] * allow_missing
    try:
        return subprocess.run(
            [sys.executable, "-m", "sgpo_jax.launch", "check", *options, "--", str(config_file), *overrides],
            env={**os.environ, **environment(machine), **offline, _INSIDE: "1"},
            timeout=_LIMIT_S,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        raise MachineError(f"check: it did not end within {_LIMIT_S:.0f} s") from None


def _inside(
    config_file: Path, overrides: Sequence[str], num_devices: int | None, *, as_json: bool, allow_missing: bool
) -> int:
    from sgpo_jax.check import report
    from sgpo_jax.check.examine import examine
    from sgpo_jax.config import load_config

    found = examine(load_config(config_file, overrides), num_devices=num_devices, allow_missing=allow_missing)
    if as_json:
        print(json.dumps(report.to_dict(found), indent=1))
    else:
        report.show(found)
    for problem in found.problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if found.problems else 0
