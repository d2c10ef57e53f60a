"""GRPO in low precision: sample -> grade -> advantages -> old log-probs -> M mini-batch updates -> sync. The loop is `train`.

    for each step:
        y ~ sampler(theta), group of G answers per prompt            mu_logp    FP8, KV cache, processed log-probs
        A = (R - mean) / std within the group                        adv
        old_logp = learner(theta)                                    FP8, no gradient, the training forward's own micro-batches
        w = min(exp(old_logp - mu_logp), 2)                          TIS: corrects sampler against learner
        for each of M mini-batches:                                  theta moves M times a step: only then is r not 1
            r = exp(new_logp - old_logp)                             FP8 forward; all three GEMMs of every linear layer in FP8
            loss = - sum w min(r A, clip(r, low, high) A) / tokens
            AdamW on FP32 masters, rounded once to BF16, quantised once
        sampler takes the BF16 weights

Precision (--precision, --rollout-precision): see precision.py. FP8 is on in the old pass and in the training forward; with one
update a step (--updates-per-step 1) the ratio is 1 and nothing low precision does to it can be seen.

    python train_grpo.py --preset demo                          embedded model, sums, minutes on a 2-core CPU, ends in a picture
    python train_grpo.py --model out/smollm2 --data problems.jsonl --precision fp8-row --out out/run
    python train_grpo.py --preset demo --dry-run                resolve flags, load model and data, stop

A run folder holds flags.json, metrics.csv (one row a step), samples.jsonl, checkpoints/step_000006/ (six finished steps, loads
in transformers), summary.json and curves.png. Same seed, same CPU and thread count: same run, bit for bit.
"""

import json
import math
import os
import resource
import sys
import time

import torch

import checkpoint
import clipping
import parallel
import plot
import recorded
import reward
import runstate
from errors import Everywhere, UserError, run_main
from eval import evaluate
from flags import parse_flags
from learner import learning_rate, old_pass, shadow_due, split, update
from rollout import row_seed
from runlog import RunLog, read_csv, write_json
from stopping import Interrupted, Stop

GATES = {"fp32": 1e-3, "bf16": 0.05}  # bound on a first step's mean |old_logp - mu_logp|; recipes not named: 0.2


def open_run_folder(args):
    """Refuse another run's folder; returns the checkpoint to resume from, or None."""
    saved = checkpoint.latest(args.out)
    if args.auto_resume and not args.dry_run:
        return saved
    if args.resume and saved is None:
        raise UserError(f"--resume: no complete checkpoint in {args.out}/checkpoints; check --out, or start in another folder")
    if not args.resume and not args.dry_run:
        csv = os.path.join(args.out, "metrics.csv")
        started = os.path.exists(csv) and read_csv(csv)["step"]  # a run stopped before its first step holds nothing
        if started or saved:
            go_on = "go on with --resume" if saved else "it stopped before its first checkpoint"
            raise UserError(f"--out {args.out} holds another run ({go_on}); choose another --out, or delete it")
    return saved if args.resume else None


# -----------------------------------------------------------------------------
# one step's parts


def sample_and_grade(run, rows, args, seed, sec):
    """A group of answers for each row: dicts with row, completion, text, reward, acc; groups are adjacent. Each rank samples
    and grades its block of the rows; every rank gets all answers."""
    seconds = []

    def own_part():
        start, (first, end) = time.perf_counter(), parallel.block(len(rows), args.vllm_tp)
        mine, options = rows[first:end], {"first": first} if first else {}
        prompts, sampling = [row["prompt_ids"] for row in mine], (args.group_size, args.temperature, args.max_tokens, seed)
        completions = run.engine.generate(prompts, *sampling, progress=parallel.is_main(), **options)
        seconds.append(time.perf_counter() - start)
        texts = [run.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        truncated = [c.finish_reason == "length" for c in completions]
        each = [row for row in mine for _ in range(args.group_size)]
        rewards = reward.score(each, texts, truncated, run.function, progress=parallel.is_main())
        return list(zip(completions, texts, rewards, strict=True))

    start = time.perf_counter()
    answers = parallel.meet(own_part, args.vllm_tp)
    slowest = parallel.largest(seconds[0])
    sec["sampled"] = sec.get("sampled", 0) + sum(len(completion.token_ids) for completion, _, _ in answers)  # of all rounds
    sec["rollout"] = sec.get("rollout", 0.0) + slowest
    sec["reward"] = sec.get("reward", 0.0) + max(0.0, time.perf_counter() - start - slowest)
    names, rows = ("row", "completion", "text", "reward", "acc"), [row for row in rows for _ in range(args.group_size)]
    right = [math.nan if math.isnan(r) else float(r > 0.5) for _, _, r in answers]
    return [dict(zip(names, (row, *answer, acc), strict=True)) for row, answer, acc in zip(rows, answers, right, strict=True)]


def add_advantages(samples, args):
    """adv, from the rewards of each group."""
    rewards = torch.tensor([s["reward"] for s in samples])
    for sample, adv in zip(samples, clipping.group_advantages(rewards, args.group_size, args.adv_scale).tolist(), strict=True):
        sample["adv"] = adv


def collect(run, args, step, sec):
    """GRPO's batch of a step: (samples, metrics). The next prompts, whatever their groups turn out to be."""
    rows = run.shuffled.next(args.prompts_per_step)
    samples = sample_and_grade(run, rows, args, row_seed(args.seed, "train", step), sec)
    add_advantages(samples, args)
    return samples, {}


def sample_record(sample):
    """A sample as a line of samples.jsonl."""
    row, completion = sample["row"], sample["completion"]
    record = {"id": row["id"], "prompt": row["prompt"], "completion": sample["text"], "gold": row["answer"]}
    record |= {"reward": sample["reward"], "adv": sample["adv"]}
    return record | {"tokens": len(completion.token_ids), "finish_reason": completion.finish_reason}


def step_metrics(samples, updates, args, sec, lr, start):
    """The CSV row: what was sampled, how the updates went, what it cost."""
    lengths = [len(s["completion"].token_ids) for s in samples]
    rewards = torch.tensor([s["reward"] for s in samples])
    accs = torch.tensor([s["acc"] for s in samples])
    metrics = {
        "reward": rewards.nanmean(), "acc": accs.nanmean(),
        "len/mean": sum(lengths) / len(lengths), "len/max": max(lengths),
        "len/trunc_frac": sum(s["completion"].finish_reason == "length" for s in samples) / len(samples),
    }  # fmt: skip
    metrics |= clipping.group_metrics(accs, args.group_size) | {"clip/low": args.clip_low, "clip/high": args.clip_high}
    adv = torch.tensor([s["adv"] for s in samples]).view(-1, args.group_size)
    metrics["frac_groups_equal"] = (adv == 0).all(1).float().mean()  # equal rewards of any value: nothing to learn from
    done = [u for u in updates if not u["skipped"]]  # one bad mini-batch must not hide the good ones
    if done:
        means = [k for k in done[0] if k in ("loss", "grad_norm", "clip/low", "clip/high") or k.startswith("bapo/")]
        metrics |= clipping.merge_metrics([{k: v for k, v in u.items() if k not in (*means, "skipped")} for u in done])
        metrics |= {k: sum(u[k] for u in done) / len(done) for k in means}
    metrics |= {"skipped": sum(u["skipped"] for u in updates), "lr": lr}
    tokens, sampled = sum(lengths), sec.pop("sampled", 0)
    metrics |= {f"sec/{k}": v for k, v in sec.items()}
    metrics |= {"sec/step": time.perf_counter() - start, "tokens": tokens}
    metrics |= {} if args.load_rollouts else {"tok_per_s/rollout": sampled / sec["rollout"]}
    metrics["tok_per_s/train"] = tokens / (sec["logp"] + sec["train"])
    cuda = torch.device(args.device).type == "cuda"
    peak = torch.cuda.max_memory_allocated(args.device) if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return metrics | {"mem_gb": parallel.largest(peak) / 2**30}


def check_gate(args, metrics):
    """Before a launch's first update: learner and sampler hold the same weights, so their log-probs differ by rounding only.
    The bound is coarse: it catches stale or other weights and another quantiser, not a temperature that is 10 % off."""
    names = (args.precision, args.rollout_precision)
    bound = args.gate if args.gate is not None else max(GATES.get(name, 0.2) for name in names)
    if args.gate is None and len(set(names)) > 1:
        bound = 0.5  # two recipes: the difference is the subject, not an error
    if args.gate is None and args.rollout_kernels == "exact":
        bound = 1e-6 if "fp32" in (args.precision, args.activations) else 1e-9  # bit-equal but for a last bit of FP32
    if not metrics["n/mu"] and float(metrics["entropy"]) >= 0:  # NaN: no answer has a reward, so nothing was compared
        raise UserError("gate: the engine returned no log-prob of any token it sampled; there is nothing to correct with")
    if args.gate is None and args.activations == "fp32" and len(set(names)) == 1 and "fp8-tensor" not in names:
        bound = min(bound, 0.02)
    if args.gate is None and args.load_rollouts:
        bound = 0  # the sampler was another run's
    gap, worst = float(metrics["mismatch/abs_dlogp_mean"]), float(metrics["mismatch/abs_dlogp_max"])
    verdict = "report only" if bound == 0 else f"bound {bound:g}: {'ok' if gap <= bound else 'FAILED'}"
    print(f"gate before the first update, learner {names[0]} against sampler {names[1]}: "
          f"mean |dlogp| {gap:.4f}, max {worst:.3f} ({verdict})")
    if bound and not gap <= bound:
        raise UserError(
            f"gate: mean |old_logp - mu_logp| {gap:.4f} is above {bound:g}: sampler and learner disagree at equal "
            "weights; look for stale weights or another quantiser, or raise --gate (0 = report only)"
        )


# -----------------------------------------------------------------------------
# the run


def held_out(run, args, when):
    """evaluate's summary on the held-out problems, with the same seed each time; None if a signal cut it short."""
    seed = row_seed(args.seed, "eval", 0)
    sampling = (args.eval_n, args.temperature, args.max_tokens, seed)
    options = dict(function=run.function, together=args.vllm_tp)
    try:
        with run.stop.interruptible(), run.stop.timed("evaluation"):
            evaluated = evaluate(run.engine, run.tokenizer, run.eval_rows, *sampling, **options)
    except Interrupted:
        return None
    result = evaluated[0]
    print(f"held-out accuracy {when}: {result['acc']:.4f} +- {result['se']:.4f} "
          f"({result['problems']} problems x {args.eval_n}, {result['len_mean']:.1f} tokens)", flush=True)
    return {"acc": result["acc"], "se": result["se"], "len": result["len_mean"]}


def train_step(run, args, step, collect):
    """One step of the loop: (metrics, samples)."""
    start, sec = time.perf_counter(), {}
    lr = learning_rate(args, step)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    with run.stop.interruptible():
        if args.load_rollouts:
            run.shuffled.next(args.prompts_per_step)
            samples, batch = recorded.load(args.load_rollouts, step, args, run.tokenizer), {}
            sec["rollout"] = time.perf_counter() - start
        else:
            samples, batch = collect(run, args, step, sec)
    if args.save_rollouts:
        parallel.on_main(recorded.save, os.path.join(args.out, "rollouts"), step, samples, args, run.tokenizer)
    run.engine.sleep()  # its GPU memory is the learner's until the sync

    t = time.perf_counter()
    shadow = shadow_due(args, run.calib, step)
    minis = split(samples, args, run.engine.pad_id)
    metrics = old_pass(run.model, minis, args, run.acrl, shadow, run.reference)
    sec["logp"] = time.perf_counter() - t
    if step == run.done + 1:
        check_gate(args, metrics)

    t, run.updating = time.perf_counter(), True
    updates = [update(run.model, run.masters, run.optimizer, mini, args, run.calib, shadow) for mini in minis]
    if shadow:
        s = time.perf_counter()
        metrics |= run.calib.update(move=args.clip == "calibrated")  # the next step's bounds
        sec["shadow"] = time.perf_counter() - s + sum(m.shadow_seconds for mini in minis for m in mini)  # in logp, train
    sec["train"] = time.perf_counter() - t

    t = time.perf_counter()
    sync(run, check=args.sync_check_every > 0 and step % args.sync_check_every == 0)
    sec["sync"], run.updating = time.perf_counter() - t, False
    return metrics | batch | step_metrics(samples, updates, args, sec, lr, start), samples


def sync(run, check=True):
    """The learner's weights into every rank's engine; checked: all engines then hold the same."""
    fingerprint = run.engine.sync(run.model.named_parameters(), check=check)
    if check:
        parallel.agree("engine", fingerprint)


def evaluates(args, step):
    return args.eval_every and (step % args.eval_every == 0 or step == args.steps)


def finish_step(run, args, step, metrics, samples):
    """After the updates: evaluate, write the row, save; whether the run has to stop here."""
    summary, best, result, problem = run.summary, False, None, None
    summary["tokens"] += metrics["tokens"]
    summary["train_seconds"] += metrics["sec/step"]
    try:
        result = held_out(run, args, f"after step {step}") if evaluates(args, step) else None
    except UserError as error:
        problem = error  # raised below: the step itself is done, and is written and saved first
    if result:
        metrics |= {"eval/acc": result["acc"], "eval/se": result["se"], "eval/len_mean": result["len"]}
        summary |= {f"{k}_after": v for k, v in result.items()}
        best = result["acc"] > summary.get("best_acc", -1.0)
        summary |= {"best_acc": result["acc"], "best_step": step} if best else {}
        if best and args.keep_best:
            print(f"best held-out accuracy so far: kept as {args.out}/checkpoints/step_{step:06d}")
    parallel.on_main(write_rows, run, args, step, metrics, samples)
    if metrics["skipped"] == args.updates_per_step:
        print(f"step {step}: no update was made: no usable reward (samples.jsonl shows them), all answers left out, or no "
              "finite gradient")
    run.state = runstate.state_of(run, args, step)
    stop = run.stop.now(evaluates(args, step + 1))
    due = step == args.steps or (args.save_every and step % args.save_every == 0) or (best and args.keep_best)
    if due or stop or problem:
        runstate.save(run, args)
    if problem:
        raise problem
    return stop


def write_rows(run, args, step, metrics, samples):
    """The row, some samples, the step line; rank 0's."""
    run.log.log(step, {k: v for k, v in metrics.items() if not k.startswith("n/")})
    run.log.samples(step, [sample_record(s) for s in samples[: args.log_samples]])
    run.log.line(step, args.steps, metrics)


def steps(run, args, collect):
    """All steps; False if the run had to stop before the last."""
    for step in range(run.done + 1, args.steps + 1):
        try:
            with run.stop.timed("step"):
                metrics, samples = train_step(run, args, step, collect)
        except (Interrupted, UserError) as error:
            # before its first update a step's weights are the last one's; a mistake of one rank alone leaves the others waiting
            together = isinstance(error, (Interrupted, Everywhere)) or parallel.world() == 1
            if together and not run.updating and run.state and run.saved != run.state["step"] and runstate.finite(run):
                runstate.save(run, args)
            if isinstance(error, Interrupted):
                return False
            raise
        if finish_step(run, args, step, metrics, samples) and step < args.steps:
            return False
    return True


def open_log(run, args, resumed):
    """The run folder's files; rank 0's."""
    run.log = RunLog(args.out, args.tensorboard, run.done if resumed else None, wandb=args.wandb, config=vars(args))
    write_json(os.path.join(args.out, "flags.json"), vars(args) | {"processes": parallel.world()})


def close_log(run, args, finished):
    run.log.close()
    if finished:
        write_json(os.path.join(args.out, "summary.json"), run.summary)
        picture = os.path.join(args.out, "curves.png")
        plot.draw([args.out], picture)
        print(f"{json.dumps(run.summary)}\npicture: {picture}")


def train(args, collect=collect):
    """A whole run. collect(run, args, step, sec) -> (samples, metrics) makes a step's batch; train_dapo.py has its own."""
    args.device = parallel.start(args.device)
    if not parallel.is_main():
        sys.stdout = open(os.devnull, "w")  # one process speaks; mistakes go to stderr from all of them
    resume_from = parallel.on_main(open_run_folder, args)
    run = runstate.setup(args)
    print(f"{parallel.world()} process{'es' * (parallel.world() > 1)} on {args.device}")
    print(json.dumps(vars(args)))
    if args.dry_run:
        return print(f"dry run: nothing sampled, nothing written to {args.out}")
    with Stop(args.save_before_seconds, runstate.save_bytes(run)) as run.stop:
        if resume_from:
            runstate.restore(run, resume_from, args)
        run.state, run.saved, run.updating = None, run.done, False
        parallel.on_main(open_log, run, args, resume_from is not None)
        sync(run)  # always before the first sample, after a resume too
        if args.eval_every and not run.done:
            result = held_out(run, args, "before") or {}
            run.summary |= {f"{k}_before": v for k, v in result.items()}
        finished = steps(run, args, collect)
    parallel.on_main(close_log, run, args, finished)
    run.engine.close()  # last: vLLM ends the process group with itself
    parallel.stop()
    if not finished:
        saved = f"step {run.saved} is saved in {args.out}; go on with --resume" if run.saved else "nothing saved; start again"
        print(f"stopped by {run.stop.reason}: {saved}")
        sys.exit(run.stop.exit_code())


if __name__ == "__main__":
    run_main(lambda: train(parse_flags(doc=__doc__)))
