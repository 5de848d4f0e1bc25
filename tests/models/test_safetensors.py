import json
import resource
import shutil
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.safetensors import (
    export_model,
    load_model,
    load_params,
    read_tensors,
    resolve_model_dir,
    write_tensors,
)
from sgpo_jax.types import MachineError, UserError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "models"
MODELS = sorted(path.name for path in FIXTURES.iterdir())
WEIGHTS = "model.safetensors"


def copy_model(name: str, to: Path) -> Path:
    shutil.copytree(FIXTURES / name, to)
    return to


def change_tensors(directory: Path, change) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def export(source: Path, out: Path, **options) -> Path:
    arch = read_architecture(source)
    dtype = options.setdefault("dtype", "float32")
    params = options.pop("params", None) or load_params(source, arch, dtype=dtype)
    export_model(params, arch, source, out, **{"max_shard_bytes": 10**9, **options})
    return out


def all_tensors(directory: Path) -> dict[str, np.ndarray]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_import_and_export_are_bit_equal(name, dtype, tmp_path):
    source = copy_model(name, tmp_path / "source")
    change_tensors(source, lambda tensors: tensors.update({k: v.astype(dtype) for k, v in tensors.items()}))
    out = export(source, tmp_path / "out", dtype=dtype)
    before, after = all_tensors(source), all_tensors(out)
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype == jnp.dtype(dtype)
        assert value.tobytes() == after[tensor].tobytes()


def test_bfloat16_checkpoint_through_float32_params_is_bit_equal(tmp_path):
    source = copy_model("qwen3", tmp_path / "source")
    change_tensors(source, lambda tensors: tensors.update({k: v.astype(jnp.bfloat16) for k, v in tensors.items()}))
    params = load_params(source, read_architecture(source))
    out = export(source, tmp_path / "out", dtype="bfloat16", params=params)
    assert {k: v.tobytes() for k, v in all_tensors(source).items()} == {
        k: v.tobytes() for k, v in all_tensors(out).items()
    }


@pytest.mark.parametrize("max_shard_bytes", [1, 9_000])
def test_sharded_export_has_an_index_and_reads_back(max_shard_bytes, tmp_path):
    source = FIXTURES / "qwen2_untied"
    out = export(source, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    assert set(index["weight_map"].values()) == {file.name for file in files}
    total = 0
    for file in files:
        tensors = load_file(file)
        size = sum(value.nbytes for value in tensors.values())
        assert size <= max_shard_bytes or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
        total += size
    assert index["metadata"]["total_size"] == total
    again = export(out, tmp_path / "again")
    assert (again / WEIGHTS).read_bytes() == (export(source, tmp_path / "whole") / WEIGHTS).read_bytes()


def test_companions_are_carried_over_and_the_type_is_renewed(tmp_path):
    source = copy_model("qwen2_tied", tmp_path / "source")
    companions = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"]
    for name in companions:
        (source / name).write_text(f"content of {name}")
    (source / "optimizer.bin").write_text("not ours")
    out = export(source, tmp_path / "out", dtype="bfloat16", extra_files={"README.md": "trained\n"})
    for name in [*companions, "generation_config.json"]:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "README.md").read_text() == "trained\n"
    assert not (out / "optimizer.bin").exists()
    config = json.loads((out / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    assert "lm_head.weight" not in all_tensors(out)


@pytest.mark.parametrize(("keys", "written"), [([], {"torch_dtype"}), (["torch_dtype"], {"torch_dtype"})])
def test_older_readers_find_the_type_under_its_older_name(keys, written, tmp_path):
    source = copy_model("qwen2_tied", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, "float32")))
    exported = json.loads((export(source, tmp_path / "out", dtype="bfloat16") / "config.json").read_text())
    assert {key: exported[key] for key in exported if "dtype" in key} == dict.fromkeys(written, "bfloat16")


def test_a_failing_export_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))  # stands for a full disk
    try:
        with pytest.raises(MachineError, match=r"out: model-.* cannot be written: File too large"):
            export(FIXTURES / "qwen3", tmp_path / "out", max_shard_bytes=9_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_while_others_are_written_is_an_error(monkeypatch, tmp_path):
    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("sgpo_jax.files.os.fdatasync", broken)
    with pytest.raises(MachineError, match=r"out: model.safetensors cannot be written: Input/output error"):
        export(FIXTURES / "qwen3", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("padding", [0, 1])
def test_tensors_are_read_as_views_of_their_files(padding, tmp_path):
    source, arch = copy_model("qwen3", tmp_path / "source"), read_architecture(FIXTURES / "qwen3")
    whole = (source / WEIGHTS).read_bytes()
    length = int.from_bytes(whole[:8], "little")  # the header may be of any length: values need not be aligned
    padded = whole[8 : 8 + length] + b" " * padding
    (source / WEIGHTS).write_bytes(len(padded).to_bytes(8, "little") + padded + whole[8 + length :])
    tensors, found = all_tensors(FIXTURES / "qwen3"), dict(read_tensors(source, arch))
    assert found.keys() == tensors.keys()
    assert all(isinstance(found[name], np.memmap) for name in tensors)
    assert all(np.array_equal(found[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_let_go_one_by_one_when_written_and_may_be_of_another_type(tmp_path):
    tensors, given = all_tensors(FIXTURES / "qwen3"), []

    def read(names):
        for name in names:
            assert sum(reference() is not None for reference in given) <= 1, "the one before"
            tensor = tensors[name].astype(np.float32) * 1.001
            given.append(weakref.ref(tensor))
            yield tensor
            del tensor

    write_tensors(read, FIXTURES / "qwen3", tmp_path / "out", dtype="bfloat16", max_shard_bytes=15_000)
    written = all_tensors(tmp_path / "out")
    assert len(given) == len(tensors) == len(written)
    for name, tensor in tensors.items():
        assert written[name].tobytes() == (tensor.astype(np.float32) * 1.001).astype(jnp.bfloat16).tobytes()


def test_tensors_larger_than_what_is_written_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setattr("sgpo_jax.files._WRITE_BYTES", 1_000)
    tensors = all_tensors(FIXTURES / "qwen3")
    assert max(tensor.nbytes for tensor in tensors.values()) > 3_000
    export(FIXTURES / "qwen3", tmp_path / "out")
    written = all_tensors(tmp_path / "out")
    assert all(np.array_equal(written[name], tensor) for name, tensor in tensors.items())


def test_export_refuses_an_existing_directory_and_another_models_configuration(tmp_path):
    with pytest.raises(UserError, match="exists already"):
        export(FIXTURES / "qwen3", tmp_path)
    model = load_model(FIXTURES / "qwen3", compute_dtype="float32", remat="none")
    with pytest.raises(UserError, match=r"llama/config\.json"):
        export_model(model, model.arch, FIXTURES / "llama", tmp_path / "out", dtype="float32", max_shard_bytes=10**9)
    assert list(tmp_path.iterdir()) == []


def test_all_problems_are_named_at_once(tmp_path):
    directory = copy_model("qwen2_tied", tmp_path / "model")

    def damage(tensors):
        del tensors["model.layers.1.self_attn.q_proj.bias"]
        tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.norm.weight"] = np.zeros(25, np.float32)
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((24, 32), np.int8)

    change_tensors(directory, damage)
    with pytest.raises(UserError) as error:
        load_params(directory, read_architecture(directory))
    for problem in [
        f"{directory}: 4 problems",
        "model.layers.1.self_attn.q_proj.bias is missing",
        "model.layers.7.mlp.up_proj.weight is not a tensor of this model",
        "model.norm.weight has shape [25], config.json means [24]",
        "model.layers.0.mlp.down_proj.weight has type I8",
    ]:
        assert problem in str(error.value)


def test_redundant_head_of_a_tied_model_must_be_its_embedding(tmp_path):
    directory = copy_model("qwen2_tied", tmp_path / "model")
    arch = read_architecture(directory)
    change_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert ("lm_head",) not in dict(nnx.to_flat_state(load_params(directory, arch)))
    change_tensors(directory, lambda t: t["lm_head.weight"].__setitem__((67, 3), 9.0))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_params(directory, arch)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    directory = copy_model("llama", tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(directory, lambda tensors: tensors.update({name: np.zeros(3, np.float32)}))
    load_params(directory, read_architecture(directory))


def test_missing_and_torn_files_are_named(tmp_path):
    directory = copy_model("llama", tmp_path / "model")
    arch = read_architecture(directory)
    whole = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(UserError, match=rf"{WEIGHTS}: not a whole safetensors file"):
        load_params(directory, arch)
    (directory / WEIGHTS).unlink()
    with pytest.raises(UserError, match=rf"{WEIGHTS}: no such file"):
        load_params(directory, arch)
    (directory / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match=r"index\.json: not an index"):
        load_params(directory, arch)


def test_model_directory_is_a_path_or_a_hub_name(tmp_path):
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match=r"\./nowhere/at/all: no such model directory"):
        resolve_model_dir("./nowhere/at/all")
    # Tests run with HF_HUB_OFFLINE (conftest.py): nothing is fetched.
    with pytest.raises(UserError, match="nobody/no-such-model: no such directory, and the Hugging Face hub"):
        resolve_model_dir("nobody/no-such-model")
