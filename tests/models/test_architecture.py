import json
from pathlib import Path

import pytest

from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.weights import num_parameters, weight_table
from sgpo_jax.types import UserError

# Qwen2.5-0.5B, as its config.json has it (the old place of rope_theta, the new one elsewhere).
QWEN25_HALF_B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write(directory: Path, **changes) -> Path:
    fields = {name: value for name, value in {**QWEN25_HALF_B, **changes}.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_reads_qwen25_and_counts_its_parameters(tmp_path):
    arch = read_architecture(write(tmp_path))
    assert (arch.head_dim, arch.qkv_bias, arch.output_bias, arch.qk_norm) == (64, True, False, False)
    assert num_parameters(arch) == 494_032_768  # the published number


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"rope_theta": "absent", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta", 5e5),
        ({"rope_scaling": None}, "rope_theta", 1e6),
        ({"num_key_value_heads": "absent"}, "num_kv_heads", 14),
        ({"model_type": "qwen3", "head_dim": "absent"}, "head_dim", 128),
        ({"model_type": "llama", "head_dim": None}, "head_dim", 64),
        ({"model_type": "qwen3"}, "qk_norm", True),
        ({"model_type": "llama"}, "qkv_bias", False),
        ({"model_type": "llama", "attention_bias": True}, "output_bias", True),
        ({"attention_bias": True}, "output_bias", False),  # Qwen2 has no such field
        ({"tie_word_embeddings": "absent"}, "tie_embeddings", False),
    ],
)
def test_fields_of_every_generation_of_config_files(tmp_path, changes, field, value):
    assert getattr(read_architecture(write(tmp_path, **changes)), field) == value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3"}, ["model_type='gemma3'", "qwen2, qwen3, llama"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type='yarn'", "default"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["rope_scaling.rope_type='linear'"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["rope_parameters.rope_type='llama3'"]),
        ({"use_sliding_window": True}, ["use_sliding_window=True"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"model_type": "llama", "mlp_bias": True}, ["mlp_bias=True"]),
        ({"vocab_size": "absent"}, ["vocab_size is missing"]),
        ({"rope_theta": "absent"}, ["rope_theta is missing"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads=4", "14"]),
    ],
)
def test_what_is_not_supported_is_refused_by_field(tmp_path, changes, words):
    with pytest.raises(UserError) as error:
        read_architecture(write(tmp_path, **changes))
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(error.value)


def test_missing_directory_missing_file_and_other_json(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such model directory"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: not a JSON object"):
        read_architecture(tmp_path)


def test_table_is_consistent(tmp_path):
    for family in ("qwen2", "qwen3", "llama"):
        table = weight_table(read_architecture(write(tmp_path, model_type=family, attention_bias=True)))
        assert len({weight.path for weight in table}) == len({weight.hf_name for weight in table}) == len(table)
        for weight in table:
            assert len(weight.shape) == len(weight.axes)
            assert weight.is_matrix == (weight.init == "normal")
            assert weight.is_stacked == ("{layer}" in weight.hf_name)
