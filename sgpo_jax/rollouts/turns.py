"""Whose turn it is on the devices, where trainer and engine share them."""

from typing import Any, Protocol

from sgpo_jax.models.sharding import park, unpark
from sgpo_jax.rollouts.gpu_memory import release_unused


class Turns(Protocol):
    """Both methods take a pytree of the trainer's and give the one to go on with; the arrays given may be gone."""

    def trainer(self, arrays: Any) -> Any:
        """The trainer works next."""
        ...

    def sampler(self, arrays: Any) -> Any:
        """The engine works next, and is first given weights (`Engine.update_weights`)."""
        ...

    def aside(self, arrays: Any) -> Any:
        """Arrays that even the trainer needs only now and then, where they wait; `on_devices` gives copies to use."""
        ...


class OwnDevices:
    """Trainer and engine are in each other's way nowhere: each has its own devices, or they are one program."""

    def trainer(self, arrays: Any) -> Any:
        return arrays

    def sampler(self, arrays: Any) -> Any:
        return arrays

    def aside(self, arrays: Any) -> Any:
        return arrays


class CanSleep(Protocol):
    def sleep(self) -> None:
        """Give the devices up until `update_weights`."""
        ...


class SharedDevices:
    """The engine sleeps while the trainer works; the trainer's arrays wait in host memory while the engine does.

    In its turn each has the devices' memory but for what the other cannot leave: its context and its programs.
    """

    def __init__(self, engine: CanSleep) -> None:
        self._engine = engine

    def trainer(self, arrays: Any) -> Any:
        self._engine.sleep()
        return unpark(arrays)

    def sampler(self, arrays: Any) -> Any:
        parked = park(arrays)
        release_unused()
        return parked

    def aside(self, arrays: Any) -> Any:
        return park(arrays)
