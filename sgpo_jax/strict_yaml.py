"""Strict YAML: a file and `key.sub=value` overrides become one typed tree, or one line that says what is wrong.

The line names the file or override, the key, the value, what is allowed, and the nearest known key.
"""

import difflib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from sgpo_jax.types import UserError


class Section(BaseModel):
    """A group of knobs. Unknown keys are errors, values are not coerced across kinds, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


T = TypeVar("T", bound=Section)


def load(root: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file, apply `key.sub=value` overrides, validate.

    Raises UserError: no such file, not YAML, a malformed override, or any key or value that the tree does not allow.
    """
    path = Path(path)
    tree, origins = read_tree(path), {}
    for override in overrides:
        origins[apply_override(tree, override)] = f"override {override!r}"
    return parse(root, tree, where=str(path), origins=origins)


def read_tree(path: Path) -> dict[str, Any]:
    """Plain values. Raises UserError: no such file, not YAML, no mapping."""
    try:
        tree = _parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        reason = getattr(error, "strerror", None) or _one_line(error)
        raise UserError(f"{path}: cannot be read as a configuration: {reason}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a configuration is a mapping of keys, such as `run_dir: runs/demo`")
    return tree


def parse(root: type[T], tree: dict[str, Any], where: str, origins: dict[str, str] | None = None) -> T:
    """Validate a tree of plain values. `where` and `origins` (by dotted key) say in errors where a value came from."""
    try:
        # Through JSON: strict there means no coercion, but a list is a tuple and 1 is a float.
        return root.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise UserError(_explain(root, error, where, origins or {})) from None


def dump(section: Section) -> str:
    """As YAML text."""
    sink = io.StringIO()
    YAML(typ="safe", pure=True).dump(section.model_dump(mode="json"), sink)
    return sink.getvalue()


def differences(old: Section, new: Section) -> dict[str, str]:
    """The dotted keys whose values differ, each with `key: old -> new`."""
    before, after = flat(old), flat(new)
    keys = sorted(before.keys() | after.keys())
    return {
        key: f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in keys if before.get(key) != after.get(key)
    }


def flat(section: Section) -> dict[str, Any]:
    """Plain values by dotted key, those of lists by index."""
    return dict(_flatten(section.model_dump(mode="json"), ""))


def all_keys(root: type[Section]) -> list[str]:
    """Every dotted key of the tree, lists of sections entered once."""
    return list(_walk(root, ""))


def _walk(section: type[Section], prefix: str) -> Any:
    for name, info in section.model_fields.items():
        yield f"{prefix}{name}"
        child = _section_of(info.annotation)
        if child:
            yield from _walk(child, f"{prefix}{name}.")


def _keys_of(root: type[Section], location: Sequence[Any]) -> list[str]:
    section = root
    for part in location:
        if isinstance(part, str) and part in section.model_fields:  # else a name of the user's own
            child = _section_of(section.model_fields[part].annotation)
            section = child or section
    return list(section.model_fields)


def _parse_yaml(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def apply_override(tree: dict[str, Any], override: str) -> str:
    """Set the value of `key.sub=value` in the tree; returns the key. Raises UserError."""
    key, equals, text = override.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise UserError(f"override {override!r}: not of the form key.sub=value, such as train.epochs=1")
    try:
        value = _parse_yaml(text)
    except YAMLError as error:
        raise UserError(f"override {override!r}: the value is not YAML: {_one_line(error)}") from None
    *parents, last = key.split(".")
    node: Any = tree
    for depth, part in enumerate(parents):
        node = _child(node, part, override, ".".join(parents[:depth]))
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise UserError(f"override {override!r}: {'.'.join(parents)} holds a single value, it has no keys")
    return key


def _child(node: Any, part: str, override: str, parent: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    if not isinstance(node, dict):
        raise UserError(f"override {override!r}: {parent} holds a single value, it has no keys")
    if node.get(part) is None:
        node[part] = {}
    return node[part]


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        raise UserError(f"override {override!r}: {part!r} is no index of a list of {len(node)}")
    return int(part)


def _explain(root: type[Section], error: ValidationError, where: str, origins: dict[str, str]) -> str:
    """The first problem as one line: where, key, value, what is allowed, the nearest known key."""
    problem = error.errors()[0]
    # pydantic inserts tags of unions into the location; keys and indices are what a user wrote.
    location = [part for part in problem["loc"] if not (isinstance(part, str) and "[" in part)]
    key = ".".join(str(part) for part in location)
    origin = next((text for name, text in origins.items() if _is_within(key, name) or _is_within(name, key)), where)
    more = len(error.errors()) - 1
    suffix = f" (and {more} more)" if more else ""
    if problem["type"] == "extra_forbidden":
        return f"{origin}: unknown key {key}={problem['input']!r}{_suggest(root, location)}{suffix}"
    if problem["type"] == "missing":
        return f"{origin}: the key {key} is missing{suffix}"
    if not location:
        return f"{origin}: {_one_line(problem['msg'].removeprefix('Value error, '))}{suffix}"
    allowed = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{origin}: {key}={_short(problem['input'])}: allowed is {_one_line(allowed)}{suffix}"


def _is_within(key: str, parent: str) -> bool:
    return key == parent or key.startswith(f"{parent}.")


def _suggest(root: type[Section], location: Sequence[Any]) -> str:
    known = sorted(_keys_of(root, location[:-1]))
    wrong = str(location[-1])
    elsewhere = [path for path in all_keys(root) if path.rsplit(".", 1)[-1] == wrong]
    if elsewhere:
        return f": did you mean {elsewhere[0]}?"
    nearest = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    if nearest:
        return f": did you mean {'.'.join([*map(str, location[:-1]), nearest[0]])}?"
    return f": known keys here are {', '.join(known)}"


def _flatten(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield prefix.removesuffix("."), tree
    for name, child in items or ():
        yield from _flatten(child, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _section_of(arg))), None)


def _one_line(message: Any) -> str:
    return " ".join(str(message).split())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
