"""Stands for one run of a study, in no time: FAKE PARENT CPUS COMMAND FILE. Standard library only.

It leaves what a run leaves. Its accuracy rises in a line over three evaluations to 100 x learning rate; DAPO generates
1,000 tokens, sGPO 400 after a profile of 100. Seed 13 fails; seed 14 waits to be interrupted.
"""

import json
import signal
import sys
import time
from pathlib import Path

NUM_PARAMS = 10
COUNTS = (
    "generated",
    "trained",
    "prompt_generated",
    "prompt_trained",
    "old_logprobs",
    "ref_logprobs",
    "rematerialised",
)


def counts(generated):
    return {"generated": generated}


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def score(accuracy):
    """Two questions, the second one harder."""
    questions = [{"query_id": "a", "avg": accuracy + 0.1}, {"query_id": "b", "avg": accuracy - 0.1}]
    return {"set": {"avg": {"mean": accuracy}, "questions": questions}}


def run(config):
    run_dir = Path(config["run_dir"])
    is_profiled = config["train"]["method"] == "sgpo"
    end = 100 * config["train"]["optimizer"]["learning_rate"]
    profiled, trained = (100, 400) if is_profiled else (0, 1000)
    rows = [
        {
            "step": step,
            "phase": f"e{step}",
            "eval/set/avg": end * (step + 1) / 3,
            "compute/paper_flops": NUM_PARAMS * (2 * profiled + 12 * trained * step // 2),
            "compute/itemised_flops": NUM_PARAMS * 2 * (profiled + trained * step // 2),
            "rollouts/num_groups": 2 * step,
            "rollouts/zero_variance_frac": 0.5 if step == 1 else 0.0,
            "seconds/total": 3.0,
            "seconds/evaluate": 1.0,
        }
        for step in (1, 2)
    ]
    del rows[1]["eval/set/avg"]  # the final evaluation takes its place
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    stages = {"profiling": counts(profiled), "training": counts(trained), "evaluation": counts(7), "wasted": counts(0)}
    tree = {"num_params": NUM_PARAMS, "stages": {name: {"tokens": tokens} for name, tokens in stages.items()}}
    write(run_dir / "compute.json", tree)
    write(run_dir / "eval" / "initial.json", score(end / 3))
    write(run_dir / "eval" / "final.json", score(end))


def main():
    _, _, _, command, file = sys.argv
    config = json.loads(Path(file).read_text())
    if config["seed"] == 13:
        print("error: no luck")
        sys.exit(2)
    if config["seed"] == 14:
        signal.signal(signal.SIGINT, lambda *_: sys.exit(1))
        Path(f"{config['run_dir']}.waits").touch()
        time.sleep(60)
    if command == "profile":
        write(Path(config["run_dir"]) / "profile.json", {"tokens": counts(100)})
    else:
        run(config)


if __name__ == "__main__":
    main()
