"""The study file: methods, tasks and seeds, how the methods are tuned, and what they are held to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from sgpo_jax import strict_yaml
from sgpo_jax.config import Count, Positive, Probability
from sgpo_jax.strict_yaml import Section

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]*$")]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1)]
Settings = dict[str, Any]
"""Of a run, as nested sections, dotted keys, or both: {train: {epochs: 1}, train.optimizer.learning_rate: 1e-4}."""

PROFILE = "profile"  # the directory of a task's shared profile


class TaskConfig(Section):
    settings: Settings = Field(default_factory=dict)
    """What makes the task: the model, the questions, the evaluation sets."""
    tuning_settings: Settings = Field(default_factory=dict)
    """What tuning runs have otherwise, whatever else is set: evaluation questions that no final run is judged by."""


class MethodConfig(Section):
    like: str | None = None
    """Another method whose settings, tuned ones included, this one starts from; empty: those of the study alone."""
    settings: Settings = Field(default_factory=dict)
    """What this method has otherwise. A run that needs a profile shares the task's; where its own would be another
    (other keys of `profile`, other sampling, other questions), it profiles for itself."""
    tune: bool = False
    """Whether its own best candidate of the grid is looked for; else it has that of the method it is `like`."""
    seeds: Seeds | None = None
    """Seeds of its final runs; empty: the study's."""


class TuningConfig(Section):
    """The same grid for every method with `tune`, tried on every task, on seeds and questions of its own."""

    seeds: Seeds
    """Seeds of the tuning runs; none of them may be a final run's."""
    grid: Annotated[dict[Name, Annotated[tuple[Settings, ...], Field(min_length=1)]], Field(min_length=1)]
    """Axes, each a list of settings under a name of your own; the candidates are all combinations."""
    at_flops: Positive | None = None
    """The best candidate has the highest mean accuracy over the tuning seeds, at this paper FLOPs of its curve; empty:
    at the end of its runs. Of equal ones, the first in the grid's order."""
    accept_failures: bool = False
    """Whether a method is decided although tuning runs of it failed: among the candidates whose every run ended well.
    Else it stays open, and the same command tries the failed runs again."""


class StudyConfig(Section):
    study_dir: Annotated[str, Field(min_length=1)]
    """Where the runs go: TASK/METHOD/seed-S is an ordinary run directory."""
    results_dir: str | None = None
    """Where tables, figures, what tuning chose and records.jsonl go, small enough to be committed; empty: study_dir. A
    run with a record is done, whether its directory is still there or not."""
    base: str
    """A run's configuration file, which everything else changes. Like every path here and there, it is relative to the
    working directory."""
    settings: Settings = Field(default_factory=dict)
    """Changes for every run. They are made in this order: the study's, the task's, the method's; later ones win."""
    tasks: Annotated[dict[Name, TaskConfig], Field(min_length=1)]
    methods: Annotated[dict[Name, MethodConfig], Field(min_length=1)]
    seeds: Seeds
    tuning: TuningConfig | None = None
    """Empty: nothing is tuned."""
    evaluation_set: str | None = None
    """The name of the set whose avg@k is the accuracy; empty: the first of evaluate.sets."""
    baselines: Annotated[tuple[str, ...], Field(min_length=1)]
    """Methods of which the one with the highest mean final accuracy is, on each task, what the others are held to."""
    margin: Probability = 0.01
    """The target accuracy is the best baseline's final one less this."""
    target_frac: Probability = 0.95
    """A second, easier target: this share of the best baseline's final accuracy."""
    budget_fracs: tuple[Positive, ...] = (0.1, 0.2, 0.3, 0.5, 1.0)
    """Shares of the best baseline's mean total (paper FLOPs) at which accuracies are compared."""
    figure_methods: tuple[str, ...] = ()
    """Methods that the figures show, few enough to tell apart; empty: those that are not `like` another."""
    num_workers: Count = 1
    """Runs side by side, each in a process of its own. Where this process sees GPUs, each gets an equal share."""
    cpus_per_worker: Count | None = None
    """CPUs that a run is kept to, where the system can; empty: this process's CPUs over num_workers, at least one."""

    @model_validator(mode="after")
    def _check(self) -> "StudyConfig":
        if PROFILE in self.methods:
            raise ValueError(f"a method cannot be named {PROFILE}: the task's shared profile lies there")
        for name, method in self.methods.items():
            if method.like is not None and method.like not in self.methods:
                raise ValueError(f"methods.{name}.like={method.like!r} is no method: {', '.join(self.methods)}")
            self.lineage(name)
        for key, names in (("baselines", self.baselines), ("figure_methods", self.figure_methods)):
            unknown = [name for name in names if name not in self.methods]
            if unknown:
                raise ValueError(f"{key}: {unknown[0]!r} is no method: {', '.join(self.methods)}")
        self._check_tuning()
        return self

    def _check_tuning(self) -> None:
        tuned = [name for name, method in self.methods.items() if method.tune]
        if tuned and self.tuning is None:
            raise ValueError(f"methods.{tuned[0]}.tune=true needs the section tuning")
        if self.tuning is None:
            return
        if not tuned:
            raise ValueError("the section tuning needs a method with tune: true")
        final = {seed for name in self.methods for seed in self.seeds_of(name)}
        if shared := final & set(self.tuning.seeds):
            raise ValueError(f"tuning.seeds: {min(shared)} is a seed of final runs too")

    @property
    def results(self) -> Path:
        """Where results go."""
        return Path(self.results_dir or self.study_dir)

    def lineage(self, name: str) -> list[str]:
        """The methods that this one descends from, first ancestor first, itself last. Raises ValueError on a circle."""
        names = [name]
        while (parent := self.methods[names[0]].like) is not None:
            if parent in names:
                raise ValueError(f"methods.{parent}.like: {' is like '.join([parent, *names])}, which is a circle")
            names.insert(0, parent)
        return names

    def seeds_of(self, name: str) -> tuple[int, ...]:
        return self.methods[name].seeds or self.seeds


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> StudyConfig:
    """Read a study file, apply `key.sub=value` overrides, validate. Raises UserError."""
    return strict_yaml.load(StudyConfig, path, overrides)


def flatten(settings: Settings) -> Settings:
    """By dotted key, in their order; lists are values."""
    flat: Settings = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= {f"{key}.{sub}": leaf for sub, leaf in flatten(value).items()}
        else:
            flat[key] = value
    return flat
