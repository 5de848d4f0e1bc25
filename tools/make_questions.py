"""Makes more questions of the arithmetic task, none of them in given files: what a study is tuned on.

    python tools/make_questions.py --mix sloppy --count 500 --seed 7 --out FILE.jsonl \\
        --exclude sgpo_jax/demo/train.jsonl --exclude sgpo_jax/demo/heldout.jsonl

The easy ones may have been shown in a demonstration, which excludes held-out questions alone. A seed always gives the
same file.
"""

import re
from pathlib import Path

import arithmetic_task as task
import click
import numpy as np

from sgpo_jax.files import read_jsonl, write_jsonl

MIXES = {"sloppy": task.HARD_WHEN_DEEP, "careful": task.HARD_ANYWHERE}  # by variant of make_demo.py


@click.command(help=__doc__)
@click.option("--mix", type=click.Choice(list(MIXES)), required=True, help="The variant of make_demo.py.")
@click.option("--count", type=click.IntRange(min=1), required=True)
@click.option("--seed", type=click.IntRange(min=0), required=True)
@click.option("--exclude", type=click.Path(path_type=Path), multiple=True, help="A question file; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(mix: str, count: int, seed: int, exclude: tuple[Path, ...], out: Path) -> None:
    taken = frozenset(parse(row["question"]) for path in exclude for row in read_jsonl(path))
    questions = task.draw_queries(np.random.default_rng(seed), MIXES[mix], count, exclude=taken)
    write_jsonl(out, map(task.question_row, questions))
    print(f"wrote {out}: {count} questions, none of {len(taken)}")


def parse(question: str) -> task.Expression:
    """The inverse of Expression.question."""
    operations = [task.Operation(symbol, int(operand)) for symbol, operand in re.findall(r"([+*-])(\d)", question)]
    return task.Expression(int(question[:2]), tuple(operations))


if __name__ == "__main__":
    main()
