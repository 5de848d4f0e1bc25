import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from sgpo_jax.config import DataConfig, SourceConfig
from sgpo_jax.data.formats import Example
from sgpo_jax.data.templates import PromptTemplate, load_tokenizer, stop_token_ids
from sgpo_jax.types import UserError

BOX = "Please reason step by step, and put your final answer within \\boxed{}."
MATH = Example("1 + 1?", "2", "math", "a:1")
CHOICE = Example("Which is even?", "B", "choice", "a:2", {"choices": ["one", "two"]})


def template(tokenizer: PreTrainedTokenizerBase, **knobs: object) -> PromptTemplate:
    return PromptTemplate(DataConfig(train=(SourceConfig(path="-"),), **knobs), tokenizer)


def user(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def system(content: str) -> str:
    return f"<|im_start|>system\n{content}<|im_end|>\n"


def test_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    assert template(tokenizer).render(MATH) == user(f"1 + 1?\n{BOX}")
    with_system = template(tokenizer, system_prompt="Be brief.")
    assert with_system.render(MATH) == system("Be brief.") + user(f"1 + 1?\n{BOX}")


def test_choice_lists_options_and_asks_for_the_letter(tokenizer: PreTrainedTokenizerBase) -> None:
    content = (
        "Which is even?\n\nA. one\nB. two\n"
        "Please reason step by step, and put the letter of the correct option within \\boxed{}."
    )
    assert template(tokenizer).render(CHOICE) == user(content)
    assert template(tokenizer, template="qwen_math").render(CHOICE) == system(BOX) + user(content)
    assert template(tokenizer, template="plain").render(CHOICE) == "Which is even?\n\nA. one\nB. two"


def test_qwen_math(tokenizer: PreTrainedTokenizerBase) -> None:
    assert template(tokenizer, template="qwen_math").render(MATH) == system(BOX) + user("1 + 1?")
    own = template(tokenizer, template="qwen_math", system_prompt="Box it.")
    assert own.render(MATH) == system("Box it.") + user("1 + 1?")


def test_instruction_only_where_a_box_is_judged(tokenizer: PreTrainedTokenizerBase) -> None:
    for kind in ("exact", "my.rewards:score"):
        assert template(tokenizer).render(Example("1 + 1?", "2", kind, "a:1")) == user("1 + 1?")
    boxed = Example("1 + 1?", "2", "exact", "a:1", {"boxed": True})
    assert template(tokenizer).render(boxed) == user(f"1 + 1?\n{BOX}")


def test_tokens_are_those_of_the_tokenizers_own_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = template(tokenizer)
    messages = [{"role": "user", "content": f"1 + 1?\n{BOX}"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat.encode([chat.render(MATH)]) == [tuple(expected)]
    assert chat.encode([]) == []


def test_plain_text_gets_the_tokenizers_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    class WithBegin:
        chat_template = None

        def __call__(self, prompts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
            return {"input_ids": [[99] * add_special_tokens + [len(text)] for text in prompts]}

    plain = template(WithBegin(), template="plain")
    assert plain.render(MATH) == "1 + 1?"
    assert plain.encode(["1 + 1?", "ab"]) == [(99, 6), (99, 2)]


def test_digest_changes_with_what_changes_prompts(tokenizer: PreTrainedTokenizerBase, tokenizer_dir: Path) -> None:
    other = load_tokenizer(tokenizer_dir)
    same = template(other).digest()
    other.chat_template += "x"
    digests = [
        template(tokenizer).digest(),
        template(tokenizer, system_prompt="").digest(),
        template(tokenizer, template="qwen_math").digest(),
        template(tokenizer, template="plain").digest(),
        template(other).digest(),
    ]
    assert len(set(digests)) == 5
    assert same == digests[0] == template(tokenizer, max_prompt_tokens=7).digest()


def test_templates_that_cannot_be(tokenizer: PreTrainedTokenizerBase, tokenizer_dir: Path) -> None:
    with pytest.raises(UserError, match=r"system_prompt has no place in data\.template=plain"):
        template(tokenizer, template="plain", system_prompt="Be brief.")
    other = load_tokenizer(tokenizer_dir)
    other.chat_template = "{{ raise_exception('no system\nmessages here') }}"
    with pytest.raises(UserError, match=r"chat template fails: no system messages here"):
        template(other).render(MATH)
    other.chat_template = None
    for name in ("chat", "qwen_math"):
        with pytest.raises(UserError, match=rf"data\.template={name} needs a tokenizer with a chat template"):
            template(other, template=name)


def test_load_tokenizer(tokenizer_dir: Path) -> None:
    loaded = load_tokenizer(tokenizer_dir)
    assert loaded.decode(loaded("a<|im_end|>")["input_ids"]) == "a<|im_end|>"


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_tokenizer_is_named(tokenizer_dir: Path, tmp_path: Path, broken: str) -> None:
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    (tmp_path / "model" / broken).write_text('{"model": 3')
    with pytest.raises(UserError, match=rf"^{tmp_path / 'model'}: the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path / "model")


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{tmp_path / 'absent'}: no such model directory"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(UserError, match=rf"^{tmp_path}: has no tokenizer"):
        load_tokenizer(tmp_path)


# What ends a completion.


def test_all_end_tokens_count(tokenizer_dir: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    assert tokenizer.eos_token_id == 3
    assert stop_token_ids(tokenizer_dir, tokenizer) == (1, 3)
    assert stop_token_ids(tmp_path, tokenizer) == (3,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert stop_token_ids(tmp_path, tokenizer) == (0, 3, 7)


@pytest.mark.parametrize("value", ["2", True, -1, [1, None], 1.0])
def test_end_token_that_is_none(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UserError, match=rf"{tmp_path / 'config.json'}: eos_token_id="):
        stop_token_ids(tmp_path, tokenizer)


def test_no_end_token_at_all(tokenizer_dir: Path, tmp_path: Path) -> None:
    endless = load_tokenizer(tokenizer_dir)
    endless.eos_token = None
    with pytest.raises(UserError, match=r"names a token that ends a completion"):
        stop_token_ids(tmp_path, endless)
