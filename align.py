"""How far is the learner from its sampler at equal weights, and what would bring them closer? (`python lab.py align` is this.)

    d_t = old_logp_t - mu_logp_t        of the sampled tokens, before any update: 0 if both sides computed the same numbers
    k3  = mean(exp(d) - 1 - d)          estimates KL(sampler || learner)

Every sampler (vLLM and the transformers engine, each recipe) meets two learners: the *aligned* one, which runs the same
quantiser, and a BF16 one. The ratio of their mean |d| says what sharing the quantiser buys; its interval is a bootstrap over
answers, both learners scoring the same ones. Then the FP8 recipes again with one thing made closer at a time:

    pow2        scales rounded up to powers of two, both sides: an amax off by one BF16 step no longer moves every code
    products    codes multiplied in FP32 instead of BF16, both sides: the GEMM's shape no longer shows in its rounding
    norm        vLLM's RMSNorm takes the rounded residual sum, as transformers does, not the FP32 one
    rope        vLLM's RoPE rounds after each multiplication, as transformers does, not once
    attention   the learner's attention is summed in FP64 and rounded once (exact.py)
    fp32        everything but the FP8 operands in FP32, residual stream and norms included, both sides
    all         pow2, products, norm, rope and attention; fp32+pow2: those two

`plain` is vLLM as it comes; our engine's default is now `norm+rope` on a CPU, `rope` on a GPU.

Why small things matter: a difference of one BF16 step in one element flips an E4M3 code with probability about 1/16, a flipped
code moves the next layer's outputs by about one BF16 step, and a few layers on the roundings of the two sides are unrelated.

    python align.py --model tiny --prompts 256 --max-tokens 40 --out out/align/tiny
    python align.py --model out/smollm2 --prompts 64 --max-tokens 64 --out out/align/smollm2
"""

import csv
import math
import os

import torch
from tqdm import tqdm

import data
import exact  # noqa: F401  registers the attention
import precision
import stats
import tiny
from clipping import mismatch_metrics
from errors import Flags, UserError, check_device, number, run_main
from logprob import collate, micro_batches, token_logps
from rollout import make_engine

POW2, PRODUCTS = {"power_of_two": True}, {"fp32_products": True}
# arm -> (quantiser of both sides, dtype of the rest, what is made equal)
ARMS = {
    "plain": ({}, None, ()),
    "pow2": (POW2, None, ()),
    "products": (PRODUCTS, None, ()),
    "norm": ({}, None, ("norm",)),
    "rope": ({}, None, ("rope",)),
    "attention": ({}, None, ("attention",)),
    "norm+rope": ({}, None, ("norm", "rope")),
    "all": (POW2 | PRODUCTS, None, ("norm", "rope", "attention")),
    "fp32": ({}, torch.float32, ("rope",)),
    "fp32+pow2": (POW2, torch.float32, ("rope",)),
}


def make_learner(path, recipe, device, quantiser, dtype=None, equal=()):
    """The learner's module as training holds it: weights rounded to BF16, in `dtype` or the recipe's."""
    model, tokenizer, _ = precision.load_model(path, recipe, device, torch.float32, **quantiser)
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16).to(dtype or precision.recipe_of(recipe)["dtype"])
    precision.weights_changed(model)
    if "attention" in equal:
        model.set_attn_implementation("exact")
    return model, tokenizer


@torch.no_grad()
def score(model, prompts, completions, n, temperature):
    """(old, mu, mask) of all answers, (answers, T); the learner sees padded micro-batches by length, as in training."""
    prompts = [p for p in prompts for _ in range(n)]
    T = max(len(c.token_ids) for c in completions)
    old, mu, mask = torch.zeros(len(prompts), T), torch.zeros(len(prompts), T), torch.zeros(len(prompts), T, dtype=torch.bool)
    for group in micro_batches([len(p) + len(c.token_ids) for p, c in zip(prompts, completions, strict=True)], 4096):
        batch = collate([prompts[i] for i in group], [completions[i].token_ids for i in group], 0, model.device)
        logp, _ = token_logps(model, batch, temperature)
        old[group, : logp.shape[1]], mask[group, : logp.shape[1]] = logp.cpu(), batch.mask.cpu()
    for i, c in enumerate(completions):
        mu[i, : len(c.logps)] = torch.tensor(c.logps)
    return old, mu, mask


def measure(sampler, engine, learners, prompts, args):
    """One CSV row of a sampler: the gaps of both learners (name -> module) on the same answers, and their ratio."""
    completions = engine.generate(prompts, args.n, args.temperature, args.max_tokens, args.seed)
    row, sums = dict(sampler, answers=len(completions), tokens=sum(len(c.token_ids) for c in completions)), {}
    for name, learner in learners.items():
        old, mu, mask = score(learner, prompts, completions, args.n, args.temperature)
        m = mismatch_metrics(old, mu, mask)
        row |= {f"{name} {k}": float(m[f"mismatch/{key}"]) for k, key in
                (("mean", "abs_dlogp_mean"), ("p99", "abs_dlogp_p99"), ("max", "abs_dlogp_max"), ("k3", "kl_k3"))}
        sums[name] = torch.where(mask, (old - mu).abs(), 0).sum(1)
    ratio, low, high = stats.ratio_of_sums(sums["aligned"], sums["bf16"], seed=args.seed)
    return row | {"ratio": ratio, "ratio_low": low, "ratio_high": high}


def study(args, path):
    """All rows, each written as soon as it is measured."""
    bf16, tokenizer = make_learner(path, "bf16", args.device, {})
    prompts = [row["prompt_ids"] for row in data.load(args.data, tokenizer, args.max_prompt_tokens)[: args.prompts]]
    plan = [("hf", recipe, "plain") for recipe in args.precisions]
    plan += [("vllm", recipe, arm) for recipe in args.precisions for arm in ARMS
             if arm == "plain" or (arm in args.arms and precision.recipe_of(recipe)["granularity"] in ("row", "block"))]
    plan = [row for row in plan if row[0] in args.engines]
    rows, csv_path = [], os.path.join(args.out, "align.csv")
    for kind, recipe, arm in tqdm(plan, desc="alignment", disable=None):
        quantiser, dtype, equal = ARMS[arm]
        aligned, _ = make_learner(path, recipe, args.device, quantiser, dtype, equal)
        extra = {"dtype": dtype, "own_rope": "rope" not in equal, "own_norm": "norm" not in equal} if kind == "vllm" else {}
        engine = make_engine(kind, aligned, tokenizer, recipe, args.rows, **quantiser, **extra)
        engine.sync(aligned.named_parameters())
        sampler = {"engine": kind, "recipe": recipe, "arm": arm}
        rows.append(measure(sampler, engine, {"aligned": aligned, "bf16": bf16}, prompts, args))
        engine.close()
        with open(csv_path, "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        print(f"{kind} {recipe} {arm}: aligned {rows[-1]['aligned mean']:.4f}, BF16 {rows[-1]['bf16 mean']:.4f}, "
              f"ratio {rows[-1]['ratio']:.3f} [{rows[-1]['ratio_low']:.3f}, {rows[-1]['ratio_high']:.3f}]", flush=True)
    return rows


def main(argv=None):
    parser = Flags(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="transformers folder, or `tiny`")
    parser.add_argument("--data", default="arith:test", help="prompts, as train_grpo.py's --data")
    parser.add_argument("--prompts", type=number(int, 2), default=64)
    parser.add_argument("--n", type=number(int, 1), default=1, help="answers per prompt")
    parser.add_argument("--max-tokens", type=number(int, 1), default=64)
    parser.add_argument("--max-prompt-tokens", type=number(int, 1), default=512)
    parser.add_argument("--temperature", type=number(float, above=0), default=1.0)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8-tensor", "fp8-row", "fp8-block"])
    parser.add_argument("--engines", nargs="+", choices=["hf", "vllm"], default=["hf", "vllm"])
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="closer forwards to try on fp8-row and fp8-block")
    parser.add_argument("--rows", type=number(int, 1), default=64, help="sequences decoded at once")
    parser.add_argument("--seed", type=number(int, 0), default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="out/align")
    args = parser.parse_args(argv)
    check_device(args.device)
    for flag, given, known in (("--precisions", args.precisions, precision.RECIPES), ("--arms", args.arms, ARMS)):
        odd = [name for name in given if name not in known]
        if odd:
            raise UserError(f"{flag} {odd[0]!r} is not one of {', '.join(known)}")
    if "cuda" in args.device and {"norm", "norm+rope", "all"} & set(args.arms):
        raise UserError("--arms: norm, norm+rope and all exchange forward methods, which vLLM's CUDA graphs would not notice; "
                        "name the other arms")
    os.makedirs(args.out, exist_ok=True)
    rows = study(args, tiny.prepare() if args.model == "tiny" else args.model)
    short = [{k: v for k, v in row.items() if k != "answers" and not (isinstance(v, float) and math.isnan(v))} for row in rows]
    with open(os.path.join(args.out, "align.md"), "w", encoding="utf-8") as f:
        f.write(stats.markdown(short) + "\n")
    print(f"{args.out}/align.csv, {args.out}/align.md")


if __name__ == "__main__":
    run_main(main)
