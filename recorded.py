"""Recorded rollouts: the samples of a run's steps, to train or compare methods on identical data without an engine.

    python train_grpo.py ... --save-rollouts --out out/a            writes out/a/rollouts/step_000001.jsonl, ...
    python train_grpo.py ... --load-rollouts out/a/rollouts --clip calibrated --out out/b

A file holds what was sampled under which conditions (first line), then one answer a line: prompt and answer ids, the sampler's
log-probs, how it ended, the reward. Advantages are taken anew, so --adv-scale may differ. From the second step on the weights
of the loading run are its own while the answers are the recording run's: old_logp is measured as always, and the sampler
correction sees the difference.
"""

import json
import os
import re

import torch

import clipping
from errors import UserError
from rollout import Completion
from runlog import disk_errors, plain, replacing


def path_of(folder, step):
    return os.path.join(folder, f"step_{step:06d}.jsonl")


def conditions(args, tokenizer):
    """What must agree between the run that recorded and the run that loads."""
    return {"temperature": args.temperature, "group_size": args.group_size, "prompts_per_step": args.prompts_per_step,
            "vocabulary": len(tokenizer)}


def save(folder, step, samples, args, tokenizer):
    """Write a step's samples (dicts with row, completion, text, reward), atomically."""
    with disk_errors(folder):
        os.makedirs(folder, exist_ok=True)
    with replacing(path_of(folder, step)) as f:
        head = conditions(args, tokenizer) | {"model": args.model, "rollout_precision": args.rollout_precision}
        f.write(json.dumps(head) + "\n")
        for s in samples:
            c, row = s["completion"], {k: s["row"][k] for k in ("id", "prompt", "answer", "prompt_ids")}
            record = {"row": row, "token_ids": c.token_ids, "logps": c.logps, "finish_reason": c.finish_reason}
            f.write(json.dumps(plain(record | {k: s.get(k) for k in ("text", "reward", "acc", "left_out")})) + "\n")


def check(folder, args):
    """Before anything is loaded: raise UserError unless every step has its file; print where another model or sampler spoke."""
    missing = [step for step in range(1, args.steps + 1) if not os.path.exists(path_of(folder, step))]
    if missing:
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        steps = [int(m[1]) for name in names if (m := re.fullmatch(r"step_(\d+)\.jsonl", name))]
        held = f"it holds steps {steps[0]} to {steps[-1]}; lower --steps" if steps else "it holds no step_*.jsonl"
        held = held if os.path.isdir(folder) else "there is no such folder"
        raise UserError(f"--load-rollouts {folder}: no {os.path.basename(path_of(folder, missing[0]))}; {held}")
    with open(path_of(folder, 1), encoding="utf-8") as f:
        head = parse(f.readline(), path_of(folder, 1), 1)
    for name in ("model", "rollout_precision"):
        if head.get(name) != getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            print(f"--load-rollouts {folder}: sampled with {flag} {head.get(name)}, not {getattr(args, name)}")


def parse(line, path, i):
    """A line as a dict."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path} line {i} is not JSON ({error}); record the step again") from error
    if not isinstance(record, dict):
        raise UserError(f"{path} line {i} is not a JSON object; record the step again")
    return record


def load(folder, step, args, tokenizer):
    """A step's samples as `train_grpo.sample_and_grade` returns them. Raises UserError on a missing file, a damaged line, or
    conditions that differ from this run's flags."""
    path = path_of(folder, step)
    with open(path, encoding="utf-8") as f:
        records = [parse(line, path, i) for i, line in enumerate(f, 1)]
    head, *records = records or [{}]
    for name, value in conditions(args, tokenizer).items():
        if head.get(name) != value:
            flag = "--model" if name == "vocabulary" else f"--{name.replace('_', '-')}"
            raise UserError(f"{path} was recorded with {name} {head.get(name)}, this run has {value}; change {flag}")
    if len(records) != args.prompts_per_step * args.group_size:
        raise UserError(f"{path} holds {len(records)} answers, not --prompts-per-step x --group-size; record the step again")
    for i, r in enumerate(records, 2):
        odd = [key for key in ("row", "token_ids", "logps", "finish_reason", "text", "reward") if key not in r]
        if odd or not all(0 <= t < len(tokenizer) for t in r["token_ids"] + r["row"].get("prompt_ids", [-1])):
            what = f"has no {odd[0]!r}" if odd else "holds token ids that the model's tokenizer does not have"
            raise UserError(f"{path} line {i} {what}; record the step again")
    nan = float("nan")
    rewards = [nan if r["reward"] is None else r["reward"] for r in records]
    adv = clipping.group_advantages(torch.tensor(rewards), args.group_size, args.adv_scale).tolist()
    samples = []
    for r, reward, a in zip(records, rewards, adv, strict=True):
        completion = Completion(r["token_ids"], [nan if x is None else x for x in r["logps"]], r["finish_reason"])
        sample = {"row": r["row"], "completion": completion, "text": r["text"], "reward": reward, "adv": a}
        acc = r.get("acc")  # not the reward's where that is shaped (DAPO)
        acc = (nan if reward != reward else float(reward > 0.5)) if acc is None else acc
        samples.append(sample | {"acc": acc, "left_out": bool(r.get("left_out"))})
    return samples
