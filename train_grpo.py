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
import time

import torch

import checkpoint
import clipping
import data
import plot
import precision
import reward
import tiny
from errors import Flags, UserError, number, run_main
from eval import evaluate
from logprob import collate, micro_batches, token_logps
from rollout import make_engine, row_seed
from runlog import RunLog, write_json

PRESETS = {
    "demo": dict(
        model="tiny", data="arith:train", eval_data="arith:test", out="out/demo", steps=40, prompts_per_step=32, group_size=8,
        updates_per_step=4, max_tokens=40, lr=5e-5, precision="fp8-row", eval_every=20, save_every=20,
    ),
}  # fmt: skip
CORRECTIONS = ("none", "tis", "icepop", "mis")
GATES = {"fp32": 1e-3, "bf16": 0.05}  # step-0 bound on mean |old_logp - mu_logp|; recipes not named: 0.2


# -----------------------------------------------------------------------------
# flags


def make_parser():
    parser = Flags(description=__doc__.splitlines()[0])
    g = parser.add_argument_group("model and data")
    g.add_argument("--model", default="tiny", help="transformers folder or hub name; `tiny` makes the embedded model")
    g.add_argument("--data", default="arith:train", help="arith:train, or a JSONL file with prompt and answer")
    g.add_argument("--eval-data", default="", help="held-out problems, same forms as --data")
    g.add_argument("--prompt-column", default="prompt")
    g.add_argument("--answer-column", default="answer")
    g.add_argument("--system-prompt", default="", help="for models with a chat template")
    g.add_argument("--max-prompt-tokens", type=number(int, 1), default=1024, help="longer prompts are dropped, with a count")
    g = parser.add_argument_group("run")
    g.add_argument("--out", default="out/run", help="run folder")
    g.add_argument("--preset", choices=list(PRESETS), help="a set of flags; flags given explicitly win")
    g.add_argument("--seed", type=number(int, 0), default=0)
    g.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    g.add_argument("--dry-run", action="store_true", help="resolve flags, load model and data, stop before sampling")
    g.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out; --steps stays the total")
    g.add_argument("--save-every", type=number(int, 0), default=50, help="steps between checkpoints; 0 = only the last")
    g.add_argument("--keep-last", type=number(int, 0), default=2, help="checkpoints kept; 0 = all")
    g.add_argument("--eval-every", type=number(int, 0), default=50, help="steps; also before and after; 0 = never")
    g.add_argument("--eval-problems", type=number(int, 2), default=200)
    g.add_argument("--eval-n", type=number(int, 1), default=4, help="answers per held-out problem")
    g.add_argument("--log-samples", type=number(int, 0), default=16, help="answers a step in samples.jsonl")
    g.add_argument("--tensorboard", action="store_true")
    g = parser.add_argument_group("batch")
    g.add_argument("--steps", type=number(int, 1), default=500, help="total, also with --resume")
    g.add_argument("--prompts-per-step", type=number(int, 1), default=32)
    g.add_argument("--group-size", type=number(int, 1), default=8, help="answers per prompt, at least 2")
    g.add_argument("--updates-per-step", type=number(int, 1), default=4, help="mini-batches a step")
    g.add_argument("--micro-tokens", type=number(int, 1), default=16384, help="padded tokens per forward and backward")
    g = parser.add_argument_group("sampling")
    g.add_argument("--engine", choices=["hf"], default="hf")
    g.add_argument("--max-tokens", type=number(int, 1), default=512, help="tokens per answer")
    g.add_argument("--temperature", type=number(float, 0), default=1.0)
    g.add_argument("--rollout-rows", type=number(int, 1), default=256, help="sequences decoded at once")
    g.add_argument("--gate", type=number(float, 0), help="bound on step 0's mean |old_logp - mu_logp|; 0 = report only")
    g = parser.add_argument_group("optimiser")
    g.add_argument("--lr", type=number(float, above=0), default=1e-6, help="constant after --warmup")
    g.add_argument("--warmup", type=number(int, 0), default=0, help="steps of linear warm-up")
    g.add_argument("--weight-decay", type=number(float, 0), default=0.01)
    g.add_argument("--grad-clip", type=number(float, above=0), default=1.0, help="bound on the gradient's global norm")
    g = parser.add_argument_group("precision")
    g.add_argument("--precision", default="fp8-row", help=", ".join(precision.RECIPES))
    g.add_argument("--rollout-precision", help="the sampler's; default: the learner's")
    g.add_argument("--fp8-backend", choices=["emulate", "scaled_mm"], help="default: scaled_mm on a GPU, emulate on a CPU")
    g.add_argument("--fp8-grads", choices=list(precision.GRAD_DTYPES), default="e4m3", help="format of gradients")
    g.add_argument("--pow2-scales", action="store_true", help="round FP8 scales up to powers of two")
    g.add_argument("--keep-bf16", default="", help="decoder layers left in BF16 by position, e.g. first:1,last:1")
    g = parser.add_argument_group("method")
    g.add_argument("--clip-low", type=number(float, 0), default=0.8, help="lower bound of the ratio")
    g.add_argument("--clip-high", type=number(float, 0), default=1.24, help="upper bound of the ratio")
    g.add_argument("--dual-clip", type=number(float, 0), default=0.0, help="bound on r where A < 0, e.g. 3; 0 = off")
    g.add_argument("--correction", choices=CORRECTIONS, default="tis", help="sampler against learner")
    g.add_argument("--tis-cap", type=number(float, above=0), default=2.0)
    g.add_argument("--tis-level", choices=["token", "sequence"], default="token")
    g.add_argument("--loss-agg", choices=clipping.AGGS, default="token-mean")
    g.add_argument("--adv-scale", choices=["std", "none"], default="std", help="none: not divided by the std (Dr.GRPO)")
    return parser


def parse_flags(argv=None):
    """Flags with the preset's values as defaults, checked against each other before anything is loaded."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.preset:
        parser.set_defaults(**PRESETS[args.preset])
        args = parser.parse_args(argv)
    args.rollout_precision = args.rollout_precision or args.precision
    for flag in ("precision", "rollout_precision"):
        if getattr(args, flag) not in precision.RECIPES:
            name = flag.replace("_", "-")
            raise UserError(f"--{name} {getattr(args, flag)!r} is not one of {', '.join(precision.RECIPES)}")
    if args.group_size < 2:
        raise UserError("--group-size 1: an answer's advantage is its reward against its group's mean; use 2 or more")
    N = args.prompts_per_step * args.group_size
    if N % args.updates_per_step:
        divisors = [m for m in range(1, min(N, 64) + 1) if N % m == 0]
        raise UserError(
            f"--prompts-per-step {args.prompts_per_step} x --group-size {args.group_size} = {N} answers do not split into "
            f"--updates-per-step {args.updates_per_step} equal mini-batches; use one of {divisors}"
        )
    if args.temperature == 0:
        raise UserError("--temperature 0 samples a group of equal answers, which teaches nothing; use 1.0")
    if not args.clip_low < 1 < args.clip_high:
        bounds = f"--clip-low {args.clip_low} and --clip-high {args.clip_high}"
        raise UserError(f"{bounds} bound a ratio: low < 1 < high, e.g. 0.8 and 1.24")
    if args.dual_clip and args.dual_clip <= args.clip_high:
        raise UserError(f"--dual-clip {args.dual_clip} must be above --clip-high {args.clip_high}; 0 switches it off")
    if args.eval_every and not args.eval_data:
        args.eval_every = 0  # nothing to evaluate on: printed with the other flags
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("started with WORLD_SIZE > 1: training on several processes is not built yet; run one process")
    return args


def open_run_folder(args):
    """Refuse another run's folder; returns the checkpoint to resume from, or None."""
    if not args.resume:
        if os.path.exists(os.path.join(args.out, "metrics.csv")) or os.path.isdir(os.path.join(args.out, "checkpoints")):
            raise UserError(f"--out {args.out} holds another run; go on with --resume, choose another --out, or delete it")
        return None
    path = checkpoint.latest(args.out)
    if path is None:
        raise UserError(f"--resume: no complete checkpoint in {args.out}/checkpoints; check --out, or leave --resume out")
    return path


# -----------------------------------------------------------------------------
# one step's parts


class Micro:
    """One micro-batch: the padded batch, and per response token what the loss needs (all (B, T), FP32)."""

    def __init__(self, samples, pad_id, device):
        completions = [s["completion"] for s in samples]
        self.batch = collate([s["row"]["prompt_ids"] for s in samples], [c.token_ids for c in completions], pad_id, device)
        T = self.batch.mask.shape[1]
        mu = torch.tensor([c.logps + [0.0] * (T - len(c.logps)) for c in completions], dtype=torch.float32)
        self.mu_logp = mu.to(device)
        self.adv = torch.tensor([s["adv"] for s in samples], dtype=torch.float32, device=device)  # (B,)
        usable = torch.tensor([not math.isnan(s["reward"]) for s in samples], device=device)
        self.mask = self.batch.mask & usable[:, None]  # a sample without a reward trains nothing
        self.old_logp = self.entropy = self.weight = None


def sample_and_grade(engine, tokenizer, rows, args, step, sec):
    """One batch of samples: dicts with row, completion, text, reward, adv; groups are adjacent."""
    start = time.perf_counter()
    seed = row_seed(args.seed, "train", step)
    prompts = [row["prompt_ids"] for row in rows]
    completions = engine.generate(prompts, args.group_size, args.temperature, args.max_tokens, seed, progress=True)
    sec["rollout"] = time.perf_counter() - start
    start = time.perf_counter()
    rows = [row for row in rows for _ in range(args.group_size)]
    texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
    truncated = [c.finish_reason == "length" for c in completions]
    rewards = reward.grade_batch(texts, [row["answer"] for row in rows], truncated, progress=True)
    adv = clipping.group_advantages(torch.tensor(rewards), args.group_size, args.adv_scale).tolist()
    sec["reward"] = time.perf_counter() - start
    fields = zip(rows, completions, texts, rewards, adv, strict=True)
    return [dict(zip(("row", "completion", "text", "reward", "adv"), f, strict=True)) for f in fields]


def split(samples, args, pad_id):
    """M mini-batches of equal size in sampling order (whole groups where G allows), each a list of micro-batches by length."""
    size = len(samples) // args.updates_per_step
    minis = []
    for k in range(0, len(samples), size):
        mini = samples[k : k + size]
        lengths = [len(s["row"]["prompt_ids"]) + len(s["completion"].token_ids) for s in mini]
        groups = micro_batches(lengths, args.micro_tokens)
        minis.append([Micro([mini[i] for i in group], pad_id, args.device) for group in groups])
    return minis


@torch.no_grad()
def old_pass(model, minis, args):
    """old_logp and entropy at the step's starting weights, on exactly the micro-batches of the training forward (tensor scales
    see the whole micro-batch), then the sampler correction. Returns the mismatch, correction and entropy metrics."""
    micros = [m for mini in minis for m in mini]
    parts = []
    for m in micros:
        m.old_logp, m.entropy = token_logps(model, m.batch, args.temperature)
        if args.correction == "tis":
            m.weight, metrics = clipping.tis_weight(m.old_logp, m.mu_logp, m.mask, args.tis_cap, args.tis_level)
        elif args.correction == "icepop":
            m.weight, metrics = clipping.icepop_weight(m.old_logp, m.mu_logp, m.mask)
        elif args.correction == "mis":
            m.kept, metrics = clipping.mis_mask(m.old_logp, m.mu_logp, m.mask)
        else:
            metrics = {}
        parts.append(metrics)
    old, mu, entropy = (torch.cat([getattr(m, name)[m.mask] for m in micros]) for name in ("old_logp", "mu_logp", "entropy"))
    ones = torch.ones(1, len(old), dtype=torch.bool, device=old.device)
    metrics = clipping.mismatch_metrics(old[None], mu[None], ones) | (clipping.merge_metrics(parts) if parts[0] else {})
    metrics["entropy"] = entropy.mean() if len(entropy) else float("nan")
    per_answer = torch.cat([(m.entropy * m.mask).sum(1) / m.mask.sum(1).clamp(min=1) for m in micros])
    edges = [0.0, 0.2, 0.5, 1.0, math.inf]  # the bins of arXiv:2609.22870: garbled answers live in the last
    for low, high in zip(edges, edges[1:], strict=False):
        share = ((per_answer >= low) & (per_answer < high)).float().mean()
        metrics[f"entropy_bins/{low:g}-{high:g}" if high < math.inf else f"entropy_bins/{low:g}+"] = share
    if args.correction == "mis":
        for m in micros:
            m.mask = m.kept
    return metrics


def loss_denom(mini, args):
    """What divides the summed loss of a mini-batch, so that its micro-batches' losses add up to the mini-batch's loss."""
    if args.loss_agg == "token-mean":
        return sum(int(m.mask.sum()) for m in mini)
    sequences = sum(int(m.mask.any(1).sum()) for m in mini)
    return sequences * (args.max_tokens if args.loss_agg == "seq-mean-token-sum-norm" else 1)


def update(model, masters, optimizer, mini, args):
    """One optimiser step on one mini-batch. A gradient that is not finite, or no token to train on, skips it."""
    denom = loss_denom(mini, args)
    parts, loss_sum = [], 0.0
    for m in mini if denom else []:
        new_logp, _ = token_logps(model, m.batch, args.temperature)
        bounds = (args.clip_low, args.clip_high, args.dual_clip or None)
        loss, metrics = clipping.policy_loss(new_logp, m.old_logp, m.adv, m.mask, *bounds, m.weight, args.loss_agg, denom)
        loss.backward()
        loss_sum += loss.item()
        parts.append(metrics)
    if not denom:
        return {"skipped": 1}
    norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), args.grad_clip).item()
    finite = math.isfinite(norm) and math.isfinite(loss_sum)
    if finite:
        optimizer.step()
        masters.publish()
    masters.zero_grad()
    return clipping.merge_metrics(parts) | {"loss": loss_sum, "grad_norm": norm, "skipped": int(not finite)}


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
    metrics = {
        "reward": rewards.nanmean(), "acc": (rewards > 0.5).float().sum() / (~rewards.isnan()).sum().clamp(min=1),
        "len/mean": sum(lengths) / len(lengths), "len/max": max(lengths),
        "len/trunc_frac": sum(s["completion"].finish_reason == "length" for s in samples) / len(samples),
    }  # fmt: skip
    metrics |= clipping.group_metrics(rewards, args.group_size)
    done = [u for u in updates if "n/tok" in u]
    if done:
        loop = ("loss", "grad_norm")
        metrics |= clipping.merge_metrics([{k: v for k, v in u.items() if k not in (*loop, "skipped")} for u in done])
        metrics |= {k: sum(u[k] for u in done) / len(done) for k in loop}
    metrics |= {"skipped": sum(u["skipped"] for u in updates), "clip/low": args.clip_low, "clip/high": args.clip_high, "lr": lr}
    metrics |= {f"sec/{k}": v for k, v in sec.items()}
    tokens = sum(lengths)
    metrics |= {"sec/step": time.perf_counter() - start, "tokens": tokens, "tok_per_s/rollout": tokens / sec["rollout"]}
    metrics["tok_per_s/train"] = tokens / (sec["logp"] + sec["train"])
    cuda = torch.device(args.device).type == "cuda"
    peak = torch.cuda.max_memory_allocated(args.device) if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return metrics | {"mem_gb": peak / 2**30}


def check_gate(args, metrics):
    """Step 0: learner and sampler hold the same weights, so their log-probs may differ by rounding only."""
    names = (args.precision, args.rollout_precision)
    bound = args.gate if args.gate is not None else max(GATES.get(name, 0.2) for name in names)
    if args.gate is None and len(set(names)) > 1:
        bound = 0.5  # two recipes: the difference is the subject, not an error
    gap, worst = float(metrics["mismatch/abs_dlogp_mean"]), float(metrics["mismatch/abs_dlogp_max"])
    verdict = "report only" if bound == 0 else f"bound {bound:g}: {'ok' if gap <= bound else 'FAILED'}"
    print(f"step-0 gate, learner {names[0]} against sampler {names[1]}: mean |dlogp| {gap:.4f}, max {worst:.3f} ({verdict})")
    if bound and not gap <= bound:
        raise UserError(
            f"step-0 gate: mean |old_logp - mu_logp| {gap:.4f} is above {bound:g}: sampler and learner disagree at equal "
            "weights; look for another temperature, stale weights or another quantiser, or raise --gate (0 = report only)"
        )


# -----------------------------------------------------------------------------
# the run


def train(args):
    resume_from = open_run_folder(args)
    torch.manual_seed(args.seed)  # nothing below draws from the global generator; a library might
    path = tiny.prepare() if args.model == "tiny" else args.model
    quantiser = dict(backend=args.fp8_backend, grad_dtype=args.fp8_grads, power_of_two=args.pow2_scales)
    quantiser |= dict(keep_bf16=args.keep_bf16)
    model, tokenizer, report = precision.load_model(path, args.precision, args.device, **quantiser)
    print(f"{path}: {sum(p.numel() for p in model.parameters()):,} parameters; {report}")
    columns = dict(prompt_column=args.prompt_column, answer_column=args.answer_column, system_prompt=args.system_prompt or None)
    rows = data.load(args.data, tokenizer, args.max_prompt_tokens, **columns)
    eval_rows = []
    if args.eval_every:
        eval_rows = data.load(args.eval_data, tokenizer, args.max_prompt_tokens, **columns)[: args.eval_problems]
        common = data.overlap(rows, eval_rows)
        print(f"{len(rows)} training prompts, {len(eval_rows)} held out, {common} in both")
    shuffled = data.Shuffled(rows, args.seed)
    engine = make_engine("hf", model, tokenizer, args.rollout_precision, args.rollout_rows, **quantiser)
    masters = precision.Masters(model)
    cuda = torch.device(args.device).type == "cuda"
    optimizer = torch.optim.AdamW(
        masters.parameters(), lr=args.lr, betas=(0.9, 0.999), weight_decay=args.weight_decay, fused=cuda or args.device == "cpu"
    )
    print(json.dumps(vars(args)))
    if args.dry_run:
        print(f"dry run: nothing sampled, nothing written to {args.out}")
        return

    done, summary = 0, {"tokens": 0, "train_seconds": 0.0}
    if resume_from:
        weights, optimizer_state, state = checkpoint.load(resume_from)
        masters.load(weights)
        optimizer.load_state_dict(optimizer_state)
        shuffled.load_state_dict(state["data"])
        done, summary = state["step"], state["summary"]
        print(f"resumed {resume_from}: {done} of {args.steps} steps done")
    log = RunLog(args.out, args.tensorboard, resume_step=done if resume_from else None)
    write_json(os.path.join(args.out, "flags.json"), vars(args))
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else engine.eos[0]
    engine.sync(model.named_parameters())

    def held_out(when):
        seed = row_seed(args.seed, "eval", 0)
        result, _ = evaluate(engine, tokenizer, eval_rows, args.eval_n, args.temperature, args.max_tokens, seed)
        print(f"held-out accuracy {when}: {result['acc']:.4f} +- {result['se']:.4f} "
              f"({result['problems']} problems x {args.eval_n}, {result['len_mean']:.1f} tokens)", flush=True)
        return result

    if args.eval_every and not done:
        result = held_out("before")
        summary |= {"acc_before": result["acc"], "se_before": result["se"], "len_before": result["len_mean"]}
    for step in range(done + 1, args.steps + 1):
        start, sec = time.perf_counter(), {}
        lr = args.lr * min(1.0, step / max(1, args.warmup))
        for group in optimizer.param_groups:
            group["lr"] = lr
        samples = sample_and_grade(engine, tokenizer, shuffled.next(args.prompts_per_step), args, step, sec)

        t = time.perf_counter()
        minis = split(samples, args, pad_id)
        metrics = old_pass(model, minis, args)
        sec["logp"] = time.perf_counter() - t
        if step == 1:
            check_gate(args, metrics)

        t = time.perf_counter()
        updates = [update(model, masters, optimizer, mini, args) for mini in minis]
        sec["train"] = time.perf_counter() - t

        t = time.perf_counter()
        engine.sync(model.named_parameters())
        sec["sync"] = time.perf_counter() - t

        metrics |= step_metrics(samples, updates, args, sec, lr, start)
        summary["tokens"] += metrics["tokens"]
        summary["train_seconds"] += metrics["sec/step"]
        if args.eval_every and (step % args.eval_every == 0 or step == args.steps):
            result = held_out(f"after step {step}")
            metrics |= {"eval/acc": result["acc"], "eval/se": result["se"], "eval/len_mean": result["len_mean"]}
            summary |= {"acc_after": result["acc"], "se_after": result["se"], "len_after": result["len_mean"]}
        log.log(step, {k: v for k, v in metrics.items() if not k.startswith("n/")})
        log.samples(step, [sample_record(s) for s in samples[: args.log_samples]])
        log.line(step, args.steps, metrics)
        if step == args.steps or (args.save_every and step % args.save_every == 0):
            state = {"step": step, "data": shuffled.state_dict(), "summary": summary, "flags": vars(args)}
            checkpoint.save(args.out, step, model, tokenizer, masters.weights, optimizer.state_dict(), state, args.keep_last)

    log.close()
    engine.close()
    write_json(os.path.join(args.out, "summary.json"), summary)
    picture = os.path.join(args.out, "curves.png")
    plot.draw([args.out], picture)
    print(json.dumps(summary))
    print(f"picture: {picture}")


if __name__ == "__main__":
    run_main(lambda: train(parse_flags()))
