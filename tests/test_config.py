from pathlib import Path

import pytest

from sgpo_jax.config import Config, load_config, parse_config
from sgpo_jax.strict_yaml import all_keys, differences, dump
from sgpo_jax.types import UserError

MINIMAL = "run_dir: runs/x\nmodel: {path: m}\ndata: {train: [{path: a.jsonl}]}\n"
STUDY = "study-*.yaml"  # see test_study.py
CONFIGS = sorted(path for path in (Path(__file__).parent.parent / "configs").glob("*.yaml") if not path.match(STUDY))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_of_the_project_is_valid(path):
    load_config(path)
    head = path.read_text().splitlines()[0]
    assert head.startswith("# "), "a configuration begins with what it reproduces"


def test_overrides_reach_every_depth(file):
    config = load_config(
        file, ["train.optimizer.learning_rate=1e-5", "sgpo.group_sizes=[2, 8]", "data.train.0.kind=math", "mesh.fsdp=1"]
    )
    assert config.train.optimizer.learning_rate == 1e-5
    assert config.sgpo.group_sizes == (2, 8)
    assert config.data.train[0].kind == "math"
    assert config.mesh.fsdp == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=1", "override 'train.epoch=1': unknown key train.epoch=1: did you mean train.epochs?"),
        (
            "learning_rate=1",
            "override 'learning_rate=1': unknown key learning_rate=1: did you mean train.optimizer.learning_rate?",
        ),
        ("foo.bar=1", "override 'foo.bar=1': unknown key foo="),
        ("train.epochs=x", "override 'train.epochs=x': train.epochs='x': allowed is a valid integer"),
        ("train.epochs=0", "override 'train.epochs=0': train.epochs=0: allowed is greater than or equal to 1"),
        ("train.epochs=1.5", "train.epochs=1.5: allowed is a valid integer"),
        ("seed=true", "seed=True: allowed is a valid integer"),
        ("run_dir=3", "run_dir=3: allowed is a valid string"),
        ("model.remat=some", "model.remat='some': allowed is 'none', 'dots' or 'full'"),
        ("train.optimizer.learning_rate=.nan", "train.optimizer.learning_rate=nan: allowed is"),
        ("train.optimizer.learning_rate=-1", "allowed is greater than 0"),
        ("sgpo.group_sizes=[4,2]", "group_sizes must increase strictly"),
        ("rewards.correct=-1", "rewards.correct=-1.0 must exceed rewards.wrong=0.0"),
        ("rewards.overlong={max_tokens: 9999, cache_tokens: 5}", "must not exceed rollouts.max_completion_tokens=3072"),
        ("mesh={data: -1, fsdp: -1}", "-1 stands at most once"),
        ("rollouts.top_p=0.9", "top_p below 1 biases the probability ratio; set allow_biased_ratio to accept that"),
        ("hardware={device: h101, devices_per_host: 8}", "device=h101 is not known; known are a100-40gb, a100-80gb"),
        ("hardware.device=h200", "device and devices_per_host belong together"),
        ("hardware.num_hosts=2", "needs device and devices_per_host, or flops_per_s"),
        ("rollouts={engine: vllm, temperature: 0.005}", "rollouts.temperature=0.005: vLLM would sample at 0.01"),
        ("vllm.urls=[127.0.0.1:8000]", "vllm.urls.0='127.0.0.1:8000': allowed is"),
        ("vllm.port=0", "vllm.port=0: allowed is greater than or equal to 1"),
        ("vllm.memory_frac=1.5", "vllm.memory_frac=1.5: allowed is less than or equal to 1"),
        ("train.loss={skip_uninformative: true, kl_coef: 0.1}", "skip_uninformative with kl_coef or entropy_coef"),
        ("train.loss={skip_uninformative: true, entropy_coef: 0.1}", "skip_uninformative with kl_coef or entropy_coef"),
        ("train.loss={objective: rloo, advantage_ddof: 1}", "advantage_ddof must be 0"),
        ("train.loss={objective: cispo, dual_clip: 10}", "objective=cispo has no dual_clip"),
        ("train.loss={old_logprobs: sampler, sampler_weight_cap: 2}", "sampler_weight_cap must be empty"),
        ("train={method: just_in_time, loss: {old_logprobs: trainer}}", "loss.old_logprobs must be sampler"),
        ("just_in_time={num_samples: 4, group_size: 2}", "group_size=2 must be at least num_samples=4"),
        ("just_in_time.num_samples=1", "just_in_time.num_samples=1: allowed is greater than or equal to 2"),
        ("profile.stages=[4, 2]", "stages must increase strictly and stay below num_samples=8"),
        ("profile.stages=[2, 8]", "stages must increase strictly and stay below num_samples=8"),
        ("profile.certainty=0", "profile.certainty=0: allowed is greater than 0"),
        ("sgpo.later_group_sizes=[4]", "belong to later_epochs=posterior"),
        ("sgpo.drop_trivial_later=0.9", "belong to later_epochs=posterior"),
        ("sgpo={later_epochs: posterior, later_group_sizes: [8, 4]}", "later_group_sizes must increase strictly"),
        ("train.rollouts_per_step=4", "train.rollouts_per_step=4 must be at least the group size 8"),
        ("train={rollouts_per_step: 16, num_updates: 3}", "train.num_updates must not exceed the queries of a step"),
        ("train.loss.objective=ppo", "allowed is 'dapo', 'grpo', 'dr_grpo', 'rloo', 'gspo' or 'cispo'"),
        ("nonsense", "override 'nonsense': not of the form key.sub=value"),
        ("data.train.7.path=x", "override 'data.train.7.path=x': '7' is no index of a list of 1"),
        ("run_dir.sub=x", "run_dir holds a single value"),
        ("train.epochs=[1", "the value is not YAML"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(file, override, message):
    with pytest.raises(UserError) as error:
        load_config(file, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: m}\ndata: {train: [{path: a}]}\n", "the key run_dir is missing"),
        (MINIMAL + "run_dir: y\n", "duplicate key"),
        (MINIMAL + "trian: {}\n", "did you mean train?"),
        ("[1, 2]", "a configuration is a mapping of keys"),
        ("a: [", "cannot be read as a configuration"),
        ("", "a configuration is a mapping of keys"),
    ],
)
def test_broken_files_are_named(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"broken\.yaml") as error:
        load_config(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml.*No such file"):
        load_config(tmp_path / "none.yaml")


def test_what_is_dumped_is_read_back(file, tmp_path):
    config = load_config(file, ["train.loss.dual_clip=10", "evaluate.sets=[{path: b.jsonl, max_queries: 5}]"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(config))
    assert load_config(copy) == config


def test_clip_ranges_are_the_objectives_own_unless_given(file):
    def ranges(*overrides):
        loss = load_config(file, overrides).train.loss
        return loss.clip_low, loss.clip_high

    assert ranges() == ranges("train.loss={}") == (0.2, 0.28)
    assert ranges("train.loss.objective=grpo") == (0.2, 0.2)
    assert ranges("train.loss.objective=gspo") == (3e-4, 4e-4)
    assert ranges("train.loss.objective=gspo", "train.loss.clip_high=0.01") == (3e-4, 0.01)


def test_differences_name_the_keys(file):
    old = load_config(file)
    new = load_config(file, ["train.epochs=1", "sgpo.group_sizes=[2]"])
    assert differences(old, old) == {}
    assert differences(old, new)["train.epochs"] == "train.epochs: 2 -> 1"
    assert differences(old, new)["sgpo.group_sizes.2"] == "sgpo.group_sizes.2: 8 -> None"


def test_a_biased_ratio_can_be_accepted(file):
    assert load_config(file, ["rollouts={top_p: 0.9, allow_biased_ratio: true}"]).rollouts.top_p == 0.9


def test_evaluation_sets_need_names_of_their_own():
    tree = {"run_dir": "x", "model": {"path": "m"}, "data": {"train": [{"path": "a"}]}}
    with pytest.raises(UserError, match="give each a `name` of its own"):
        parse_config({**tree, "evaluate": {"sets": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}]}}, "t")


def test_every_knob_is_documented():
    def undocumented(section, prefix=""):
        for name, info in section.model_fields.items():
            if isinstance(info.annotation, type) and hasattr(info.annotation, "model_fields"):
                yield from undocumented(info.annotation, f"{prefix}{name}.")
            elif not info.description:
                yield prefix + name

    undescribed = {
        "train.optimizer.beta1",
        "train.optimizer.beta2",
        "train.optimizer.eps",
        "train.optimizer.learning_rate",
    }
    assert set(undocumented(Config)) <= undescribed | {
        "mesh.data",
        "mesh.fsdp",
        "mesh.tensor",
        "evaluate.top_p",
        "evaluate.temperature",
    }


def test_every_knob_is_read_somewhere():
    """Each key's last part is used as an attribute in the package, outside of the configuration itself."""
    package = Path(__file__).parent.parent / "sgpo_jax"
    code = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "config.py")
    unread = [key for key in all_keys(Config) if f".{key.rsplit('.', 1)[-1]}" not in code]
    assert unread == [], f"knobs that nothing reads: {unread}"


def test_the_ratio_of_stale_groups_is_against_the_sampler(file):
    assert load_config(file).train.loss.old_logprobs == "trainer"
    assert load_config(file, ["train.loss.old_logprobs=sampler"]).train.loss.old_logprobs == "sampler"
    loss = load_config(file, ["train.method=just_in_time", "train.loss.objective=grpo"]).train.loss
    assert (loss.old_logprobs, loss.clip_high) == ("sampler", 0.2)
