"""Stands for one run of a study, in no time: FAKE PARENT CPUS COMMAND FILE. Standard library only.

It leaves what a run leaves. Its accuracy rises in a line over three evaluations to 100 x learning rate; DAPO generates
1,000 tokens, sGPO 400 after a profile that cost it 100, of a larger one. Seed 13 fails, and the
learning rate that FAKE_FAILS_AT names; seed 14 waits to be interrupted. Just-in-time profiles 50 in each of its steps.
"""

import json
import os
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
    questions = [
        {"query_id": query_id, "num_judged": 1000, "num_correct": round(1000 * (accuracy + more))}
        for query_id, more in (("a", 0.1), ("b", -0.1))
    ]
    return {"set": {"avg": {"mean": accuracy}, "questions": questions}}


def run(config):
    run_dir = Path(config["run_dir"])
    method = config["train"]["method"]
    end = 100 * config["train"]["optimizer"]["learning_rate"]
    profiled, trained = (0, 1000) if method == "dapo" else (100, 400)
    rows = [
        {
            "step": step,
            "phase": f"e{step}",
            "eval/set/avg": end * (step + 1) / 3,
            "compute/paper_flops": NUM_PARAMS * (2 * profiled + 12 * trained * step // 2),
            "compute/itemised_flops": NUM_PARAMS * 2 * (profiled + trained * step // 2),
            "profile/num_groups": 4,
            "profile/num_tokens": 50 if method == "just_in_time" else 0,
            "profile/num_prompt_tokens": 0,
            "profile/zero_variance_frac": 0.75,
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
    print(f"gpus={os.environ.get('CUDA_VISIBLE_DEVICES')}")
    if config["seed"] == 13 or str(config["train"]["optimizer"]["learning_rate"]) == os.environ.get("FAKE_FAILS_AT"):
        print("error: no luck")
        sys.exit(2)
    if config["seed"] == 14:
        signal.signal(signal.SIGINT, lambda *_: sys.exit(1))
        Path(f"{config['run_dir']}.waits").touch()
        time.sleep(60)
    if command == "profile":
        write(Path(config["run_dir"]) / "profile.json", {"tokens": counts(150)})
    else:
        run(config)


if __name__ == "__main__":
    main()
