"""What PyTorch and transformers do with the same work, in an environment of their own (tools/setup_bench.sh).

Reads a specification (JSON) named on the command line, prints its result as one line of JSON. Loss, clipping of the
gradient and AdamW are those of sgpo_jax; rows are padded as TRL pads them: prompts on the left and completions on the
right, to the longest of the step's rollouts; logits only where there are completions.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

ATTENTION = ("sdpa", "eager")
PAD = 0


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    torch.manual_seed(0)
    torch.set_num_threads(spec["threads"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32, attn_implementation="sdpa")
    result = {"train": train, "decode": decode}[spec["work"]](model, spec)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**result, "versions": versions}))


def train(model: Any, spec: dict) -> dict:
    """Seconds of every update after the first ones, which choose the faster attention."""
    model.train()
    settings = spec["optimizer"]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings["weight_decay"]}, {"params": other, "weight_decay": 0.0}],
        lr=settings["learning_rate"],
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["eps"],
        fused=True,
    )
    rows = padded(spec["rollouts"])

    def step() -> dict:
        return update(model, optimizer, rows, spec)

    tried = {}
    for name in ATTENTION:
        model.set_attn_implementation(name)
        first = step()
        tried[name] = (timed(step)[0], first)
    best = min(tried, key=lambda name: tried[name][0])
    model.set_attn_implementation(best)
    seconds = [timed(step)[0] for _ in range(spec["steps"])]
    return {"seconds": seconds, "attention": best, "first": tried[ATTENTION[0]][1], "slots": rows["ids"].numel()}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def padded(rollouts: list[dict]) -> dict[str, torch.Tensor]:
    longest_prompt = max(len(r["prompt"]) for r in rollouts)
    longest = max(len(r["completion"]) for r in rollouts)
    ids, mask = [], []
    for rollout in rollouts:
        left, right = longest_prompt - len(rollout["prompt"]), longest - len(rollout["completion"])
        ids.append([PAD] * left + rollout["prompt"] + rollout["completion"] + [PAD] * right)
        mask.append([0] * left + [1] * (longest_prompt - left + longest - right) + [0] * right)
    return {
        "ids": torch.tensor(ids),
        "mask": torch.tensor(mask),
        "completion_mask": torch.tensor(mask)[:, longest_prompt:].float(),
        "advantages": torch.tensor([r["advantage"] for r in rollouts], dtype=torch.float32),
    }


def update(model: Any, optimizer: torch.optim.Optimizer, rows: dict[str, torch.Tensor], spec: dict) -> dict:
    """DAPO's update on one step's rollouts, the current policy being the old one."""
    longest = rows["completion_mask"].shape[1]
    num_tokens = rows["completion_mask"].sum()
    total = 0.0
    for start in range(0, len(rows["ids"]), spec["micro_batch_rows"]):
        part = {name: values[start : start + spec["micro_batch_rows"]] for name, values in rows.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=spec["dtype"] == "bfloat16"):
            logits = model(
                part["ids"], attention_mask=part["mask"], logits_to_keep=longest + 1, use_cache=False
            ).logits[:, :-1]
        logits = logits.float()
        chosen = logits.gather(-1, part["ids"][:, -longest:, None])[..., 0] - logits.logsumexp(-1)
        ratio = torch.exp(chosen - chosen.detach())
        advantages = part["advantages"][:, None]
        clipped = torch.clamp(ratio, 1 - spec["clip_low"], 1 + spec["clip_high"])
        gain = torch.minimum(ratio * advantages, clipped * advantages) * part["completion_mask"]
        loss = -gain.sum() / num_tokens
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), spec["optimizer"]["clip_norm"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": total, "grad_norm": float(norm)}


def decode(model: Any, spec: dict) -> dict:
    """Completion tokens and seconds of every generation after the first."""
    model.eval()
    if spec["dtype"] == "bfloat16":
        model = model.to(torch.bfloat16)
    prompts = spec["prompts"]
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    stops = torch.tensor(spec["stop_ids"])

    def generate() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                max_new_tokens=spec["max_tokens"],
                eos_token_id=spec["stop_ids"],
                pad_token_id=spec["stop_ids"][0],
            )[:, longest:]
        is_stop = torch.isin(out, stops)
        lengths = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, out.shape[1])
        return int(lengths.sum())

    tried = {}
    for name in ATTENTION:
        model.set_attn_implementation(name)
        seconds, count = timed(generate)
        tried[name] = seconds / count
    best = min(tried, key=lambda name: tried[name])
    model.set_attn_implementation(best)
    runs = [timed(generate) for _ in range(spec["steps"])]
    return {"seconds": [s for s, _ in runs], "tokens": [count for _, count in runs], "attention": best}


if __name__ == "__main__":
    main(sys.argv[1])
