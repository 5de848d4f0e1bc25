"""What a method is judged by is new to it: tuning questions, final questions and training questions are disjoint."""

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product

from sgpo_jax.config import SourceConfig
from sgpo_jax.data.queries import question_texts
from sgpo_jax.study.cells import Protocol
from sgpo_jax.types import UserError

_APART = (("tuning", "final"), ("tuning", "training"), ("final", "training"))


def check_disjoint(protocol: Protocol) -> None:
    """Of each task; of several evaluation sets, the one that accuracy is of.

    Raises UserError naming two sources that share questions, and how many; or one that cannot be read.
    """
    texts = cache(question_texts)
    for task in protocol.study.tasks:
        sources = _sources(protocol, task)
        for first, second in _APART:
            for a, b in product(sources[first], sources[second]):
                if num_shared := len(texts(a) & texts(b)):
                    raise UserError(
                        f"task {task}: {num_shared} of the {first} questions in {a.path} are {second} questions in "
                        f"{b.path} too; take them out of one of these"
                    )


def _sources(protocol: Protocol, task: str) -> Mapping[str, list[SourceConfig]]:
    tuning, final = ([c.config for c in cells if c.task == task] for cells in (protocol.tuning_cells, protocol.planned))
    return {
        "tuning": _distinct(map(protocol.evaluation_source, tuning)),
        "final": _distinct(map(protocol.evaluation_source, final)),
        "training": _distinct(source for config in (*tuning, *final) for source in config.data.train),
    }


def _distinct(sources: Iterable[SourceConfig]) -> list[SourceConfig]:
    """Each once, whatever it is called."""
    return list(dict.fromkeys(source.model_copy(update={"name": ""}) for source in sources))
