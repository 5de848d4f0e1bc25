"""From a question to the text and tokens that a model is given; the tokenizer, and what ends a completion."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sgpo_jax.config import DataConfig
from sgpo_jax.data.formats import Example, choice_letter
from sgpo_jax.files import read_json
from sgpo_jax.types import UserError

BOX_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
LETTER_INSTRUCTION = r"Please reason step by step, and put the letter of the correct option within \boxed{}."
_BOXED_KINDS = ("math", "numeric", "reasoning_gym")


class PromptTemplate:
    """Renders questions as `data.template` and `data.system_prompt` say.

    chat: the tokenizer's chat template; the user's message is the question (a choice's options listed with letters),
    then the instruction to reason and to box the answer. Questions whose answer is the whole completion (`exact`) or
    what a reward function of one's own says get no instruction.
    qwen_math: the same, but the instruction is the system message, as Qwen2.5-Math was trained with; only a choice's
    instruction, to answer with the letter, is in the user's message too.
    plain: the question (and options) as it is.

    Raises UserError: a chat template that is missing or fails, a system prompt where the template has no place for it.
    """

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._name = data.template
        self._system = data.system_prompt
        self._tokenizer = tokenizer
        if self._name == "plain" and self._system is not None:
            raise UserError("data.system_prompt has no place in data.template=plain; remove it, or use template=chat")
        if self._name != "plain" and not tokenizer.chat_template:
            raise UserError(f"data.template={self._name} needs a tokenizer with a chat template; use template=plain")
        if self._name == "qwen_math" and self._system is None:
            self._system = BOX_INSTRUCTION

    def render(self, example: Example) -> str:
        """The prompt's text, up to where the model begins to write."""
        body = _with_options(example)
        if self._name == "plain":
            return body
        instruction = self._instruction(example)
        return self._chat(f"{body}\n{instruction}" if instruction else body)

    def encode(self, prompts: list[str]) -> list[tuple[int, ...]]:
        """Token ids of rendered prompts. Chat templates write their special tokens; plain text gets the tokenizer's."""
        if not prompts:
            return []
        ids = self._tokenizer(prompts, add_special_tokens=self._name == "plain")["input_ids"]
        return [tuple(row) for row in ids]

    def digest(self) -> str:
        """Changes whenever the same questions could become other prompts."""
        parts = [self._name, self._system, BOX_INSTRUCTION, LETTER_INSTRUCTION]
        if self._name != "plain":
            parts.append(self._tokenizer.chat_template)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def _instruction(self, example: Example) -> str | None:
        if example.kind == "choice":
            return LETTER_INSTRUCTION
        is_boxed = example.kind in _BOXED_KINDS or bool(example.metadata.get("boxed"))
        return BOX_INSTRUCTION if is_boxed and self._name == "chat" else None

    def _chat(self, content: str) -> str:
        messages = [{"role": "user", "content": content}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"the tokenizer's chat template fails: {' '.join(str(error).split())[:200]}") from None


def _with_options(example: Example) -> str:
    if example.kind != "choice":
        return example.question
    options = (f"{choice_letter(index)}. {text}" for index, text in enumerate(example.metadata["choices"]))
    return "\n".join((f"{example.question}\n", *options))


def load_tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; nothing is fetched, no code of the directory is run.

    Raises UserError naming the directory: no such directory, no tokenizer in it, or a broken one.
    """
    if not Path(model_dir).is_dir():
        raise UserError(f"{model_dir}: no such model directory")
    if not any((Path(model_dir) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{model_dir}: has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the Rust side raises bare Exception for a broken file
        raise UserError(f"{model_dir}: the tokenizer cannot be loaded: {' '.join(str(error).split())[:200]}") from None


def stop_token_ids(model_dir: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token id that ends a completion, ascending: those of config.json, generation_config.json and the tokenizer.

    They differ (Qwen2.5's base models: `<|endoftext|>` in the configuration, `<|im_end|>` in the tokenizer), and a
    model may use any of them. Raises UserError where there is none, or one is no token id.
    """
    found = {tokenizer.eos_token_id} - {None}
    for name in ("config.json", "generation_config.json"):
        path = Path(model_dir) / name
        if path.is_file():
            found |= _eos_ids(read_json(path), path)
    if not found:
        raise UserError(f"{model_dir}: neither configuration nor tokenizer names a token that ends a completion")
    return tuple(sorted(found))


def _eos_ids(config: Any, path: Path) -> set[int]:
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise UserError(f"{path}: eos_token_id={value!r}, allowed is a token id or a list of them")
    return set(ids)
