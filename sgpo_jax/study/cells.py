"""What a study consists of: a profile for each task, tuning runs, final runs; each an ordinary run directory."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sgpo_jax import strict_yaml
from sgpo_jax.config import Config, SourceConfig, binding_differences, parse_config, source_name
from sgpo_jax.files import read_json
from sgpo_jax.profiling import profile_sampling, verifier_digest
from sgpo_jax.run import FINAL, Run
from sgpo_jax.study.config import PROFILE, Settings, StudyConfig, flatten
from sgpo_jax.study.records import Records
from sgpo_jax.types import UserError

Chosen = Mapping[tuple[str, str], Settings]
"""(task, method) -> the candidate of the grid that tuning chose."""


class State(StrEnum):
    NEW = "new"
    BEGUN = "begun"
    DONE = "done"


@dataclass(frozen=True)
class Cell:
    """One run.

    settings: what its method and the grid set, by dotted key. candidate: its number in the grid, where it is one of
    tuning.
    """

    task: str
    method: str
    seed: int
    config: Config
    settings: Settings
    candidate: int | None = None

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def config_file(self) -> Path:
        """What the run is started with, beside its directory."""
        return Path(f"{self.config.run_dir}.json")

    @property
    def log(self) -> Path:
        return Path(f"{self.config.run_dir}.log")

    @property
    def name(self) -> str:
        part = "" if self.candidate is None else f"candidate-{self.candidate}/"
        return f"{self.task}/{self.method}/{part}seed-{self.seed}"


class Protocol:
    """All cells of a study file, as configurations.

    planned: its final runs, with the first candidate where tuning will choose. records: of those that are done.
    Building one raises UserError for any setting that no run may have.
    """

    def __init__(self, study: StudyConfig, study_file: Path) -> None:
        self.study = study
        self._file = study_file
        self.records = Records(study.results / "records.jsonl")
        self._base = strict_yaml.read_tree(Path(study.base))
        grid = study.tuning.grid if study.tuning else {}
        self.candidates = [_merged(settings) for settings in itertools.product(*grid.values())]
        self.tuned = [name for name, method in study.methods.items() if method.tune]
        self._profiles = {task: self._profile_config(task) for task in study.tasks}
        self.tuning_cells = self._tuning_cells()
        # What is wrong with a final run is found before anything is spent, with a candidate that may not be chosen.
        self.planned = self.final_cells(
            {(task, name): self.candidates[0] for task in study.tasks for name in self.tuned}
        )
        for cell in [*self.tuning_cells, *self.planned]:
            self._check(cell)

    def final_cells(self, chosen: Chosen) -> list[Cell]:
        """Those whose settings are known: of methods that are not tuned, or for which tuning chose. Seed by seed, so
        that an unfinished study compares methods on equal terms.
        """
        seeds = dict.fromkeys(seed for method in self.study.methods for seed in self.study.seeds_of(method))
        return [
            self._cell(task, method, seed, chosen.get((task, tuned), {}) if tuned else {})
            for seed in seeds
            for task in self.study.tasks
            for method in self.study.methods
            for tuned in [self.tuned_ancestor(method)]
            if seed in self.study.seeds_of(method) and (tuned is None or (task, tuned) in chosen)
        ]

    def profile_cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """The tasks' profiles that some of these cells share."""
        shared = {cell.config.profile.reuse for cell in cells}
        return [
            Cell(task, PROFILE, config.seed, config, {})
            for task, config in self._profiles.items()
            if config.run_dir in shared
        ]

    def state_of(self, cell: Cell) -> State:
        """Raises UserError where the run is done, with other settings than the cell's."""
        if (record := self.records.find(cell.name)) is not None:
            _check_settings(record["config"], cell, self.records.where(cell.name))
            return State.DONE
        if not (cell.run_dir / "eval" / f"{FINAL}.json").exists():
            return State.BEGUN if cell.run_dir.exists() else State.NEW
        _check_settings(read_json(cell.config_file), cell, str(cell.run_dir))
        return State.DONE

    def tuned_ancestor(self, method: str) -> str | None:
        """The method whose tuning decides this one's settings: itself, or the nearest that it descends from."""
        return next((name for name in reversed(self.study.lineage(method)) if name in self.tuned), None)

    def evaluation_set(self, config: Config) -> str:
        """The name of the set that accuracy is of."""
        return self.study.evaluation_set or source_name(config.evaluate.sets[0])

    def evaluation_source(self, config: Config) -> SourceConfig:
        """The set itself."""
        name = self.evaluation_set(config)
        return next(source for source in config.evaluate.sets if source_name(source) == name)

    def _tuning_cells(self) -> list[Cell]:
        tuning = self.study.tuning
        if tuning is None:
            return []
        return [
            self._cell(task, method, seed, settings, number)
            for task in self.study.tasks
            for method in self.tuned
            for number, settings in enumerate(self.candidates)
            for seed in tuning.seeds
        ]

    def _cell(self, task: str, method: str, seed: int, settings: Settings, number: int | None = None) -> Cell:
        place = Path(self.study.study_dir) / task / method
        run_dir = place / f"seed-{seed}" if number is None else place / f"tuning/candidate-{number}-seed-{seed}"
        layers = self._layers(task, method, settings, is_tuning=number is not None)
        layers["the study"] = {"run_dir": str(run_dir), "seed": seed}
        config, shared = self._config(layers), self._profiles[task]
        if _can_share(config, shared):
            profile = config.profile.model_copy(update={"reuse": shared.run_dir})
            config = config.model_copy(update={"profile": profile})
        own = _merged(self._method_layers(method, settings).values())
        return Cell(task, method, seed, config, own, number)

    def _layers(self, task: str, method: str, candidate: Settings, *, is_tuning: bool) -> dict[str, Settings]:
        """Changes of the base in their order, by where they stand. A candidate comes after the method that was tuned,
        and before those that descend from it.
        """
        task_config = self.study.tasks[task]
        layers = {"settings": self.study.settings, f"tasks.{task}.settings": task_config.settings}
        layers |= self._method_layers(method, candidate)
        if is_tuning:
            layers[f"tasks.{task}.tuning_settings"] = task_config.tuning_settings
        return layers

    def _method_layers(self, method: str, candidate: Settings) -> dict[str, Settings]:
        layers = {}
        for name in self.study.lineage(method):
            layers[f"methods.{name}.settings"] = self.study.methods[name].settings
            if name == self.tuned_ancestor(method):
                layers["tuning.grid"] = candidate
        return layers

    def _config(self, layers: Mapping[str, Settings]) -> Config:
        tree: dict[str, Any] = json.loads(json.dumps(self._base, default=str))
        origins = {}
        for place, settings in layers.items():
            for key, value in flatten(settings).items():
                strict_yaml.apply_override(tree, f"{key}={json.dumps(value)}")
                origins[key] = f"{self._file}: {place}"
        return strict_yaml.parse(Config, tree, self.study.base, origins)

    def _profile_config(self, task: str) -> Config:
        layers = {"settings": self.study.settings, f"tasks.{task}.settings": self.study.tasks[task].settings}
        layers["the study"] = {"run_dir": str(Path(self.study.study_dir) / task / PROFILE)}
        return self._config(layers)

    def _check(self, cell: Cell) -> None:
        config = cell.config
        names = [source_name(source) for source in config.evaluate.sets]
        if not names:
            raise UserError(f"{self._file}: {cell.name} has no evaluate.sets: a study compares accuracies")
        if self.evaluation_set(config) not in names:
            raise UserError(
                f"{self._file}: evaluation_set={self.study.evaluation_set!r} is none of the evaluate.sets of "
                f"{cell.name}: {', '.join(names)}"
            )
        if any(source.max_queries for source in (*config.data.train, *config.evaluate.sets)):
            raise UserError(
                f"{self._file}: {cell.name}: max_queries draws other questions for every seed; a study needs the same "
                "for all: give a shorter file"
            )
        is_tuning, tuning = cell.candidate is not None, self.study.tuning
        if is_tuning and tuning and tuning.at_flops and not (config.evaluate.every or config.evaluate.times):
            raise UserError(
                f"{self._file}: {cell.name} has no evaluation during training, which tuning.at_flops compares by: set "
                "evaluate.times or evaluate.every in tuning_settings, or leave out tuning.at_flops"
            )


def _merged(layers: Iterable[Settings]) -> Settings:
    """By dotted key; later ones win."""
    return {key: value for layer in layers for key, value in flatten(layer).items()}


def _can_share(config: Config, shared: Config) -> bool:
    """Whether a run goes by a profile and names none, and its own would be what the task's shared one is."""
    if not Run(config, mesh=None).is_profiled or config.profile.reuse:
        return False
    return _profile_inputs(config) == _profile_inputs(shared)


def _profile_inputs(config: Config) -> tuple[Any, ...]:
    """All that a profile depends on but the seed."""
    model = config.model.path, config.model.compute_dtype
    return model, config.data, config.profile, profile_sampling(config), verifier_digest(config)


def own_settings(config: Config) -> Settings:
    """What of a configuration is not by default; `parse_config` makes it whole again."""
    return config.model_dump(mode="json", exclude_defaults=True)


def _check_settings(tree: Settings, cell: Cell, where: str) -> None:
    """Of a run that is done, against those that the study file gives it now."""
    if tree in (own_settings(cell.config), cell.config.model_dump(mode="json")):
        return  # it need not be parsed, and a study may have hundreds
    binding = binding_differences(parse_config(tree, where), cell.config)
    if binding:
        raise UserError(
            f"{where}: was run with other settings ({'; '.join(binding)}); set these back, name another study_dir, or "
            "remove that run and its record"
        )
