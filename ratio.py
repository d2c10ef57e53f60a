"""The importance ratio in low precision: how much of r = pi_new / pi_old is policy, and how much is rounding? (`lab.py ratio`)

The measurement behind Calibrated Clipping (arXiv:2609.22870), on the reader's own model. Per seed: sample answers, split them
into M mini-batches as training does, take M - 1 real AdamW updates (BF16 forward and gradients, FP32 masters, no clipping), and
score mini-batch m at the step's starting weights and at the weights after m updates, just before it would be trained on: the
ratios a step's losses see, lags 0 to M - 1 pooled. All arithmetics score the same weights in the same micro-batches:

    fp32        masters as they are, everything in FP32: the policy's true change
    bf16w       weights rounded to BF16, all else in FP32: what rounding the weights costs
    bf16        the paper's reference
    fp8-tensor, fp8-row, fp8-block
    row+pow2    fp8-row with power-of-two scales            row+frozen   with the old pass's scales, of weights too
    row+fp32    fp8-row with everything but the operands in FP32 (--activations fp32)

`main` is all answers at --lr. `sweep` is the first seed's first --sweep-prompts prompts, a batch of their own, at every size of
--sizes: an AdamW step moves a weight by about its learning rate, whatever the gradient. `phantom`: the same, the old weights
twice in two packings; the true ratio is 1 and what is left is batch composition (training's two passes share micro-batches).
Advantages are +1 and -1 in turn within a group by default: labels, not quality; a small model gets every answer wrong, and
rewards would leave nothing to update on. --adv reward grades.

Masters (--masters): `spread` puts every FP32 master at a random place of its BF16 rounding interval, as in the middle of a run;
the BF16 weights stay what they are. Where masters sit matters: from `bf16` (the first step on a BF16 checkpoint) an update of
1e-6 changes almost no BF16 weight, and `file` can hold exact ties, which any update breaks: SmolLM2 read from GGUF has 8 %.

Everything measured is kept in --out (log-probs, one file each), so that a second call with the same flags goes on where the
first stopped, and the tables and pictures of ratio_report.py can be made again.

    python lab.py ratio --model out/smollm2 --out out/ratio
"""

import contextlib
import json
import os
import time

import torch

import data
import fp8
import precision
import ratio_report
import recorded
import reward
import tiny
from errors import Flags, UserError, check_device, number, run_main
from flags import parse_flags
from learner import old_pass, split, update
from logprob import collate, micro_batches, token_logps
from rollout import make_engine, row_seed
from runlog import write_json

# name -> (recipe, quantiser, dtype that weights are rounded to, dtype of parameters and activations)
BF16, FP32 = torch.bfloat16, torch.float32
ARITHMETICS = {
    "fp32": ("fp32", {}, FP32, FP32),
    "bf16w": ("bf16", {}, BF16, FP32),
    "bf16": ("bf16", {}, BF16, BF16),
    "fp8-tensor": ("fp8-tensor", {}, BF16, BF16),
    "fp8-row": ("fp8-row", {}, BF16, BF16),
    "fp8-block": ("fp8-block", {}, BF16, BF16),
    "row+pow2": ("fp8-row", {"power_of_two": True}, BF16, BF16),
    "row+frozen": ("fp8-row", {}, BF16, BF16),
    "row+fp32": ("fp8-row", {}, BF16, FP32),
}
PLAIN = ("fp32", "bf16", "fp8-tensor", "fp8-row", "fp8-block")  # what every seed and the sweep over sizes look at


@contextlib.contextmanager
def scales(store, replay):
    """Record every scale that make_operand computes, in order of the calls, or replay them: frozen scales."""
    original, at = fp8.make_operand, iter(store)

    def make_operand(x, granularity, dtype, backend, block=(1, fp8.BLOCK), power_of_two=False, products=BF16, scale=None):
        operand = original(x, granularity, dtype, backend, block, power_of_two, products, next(at) if replay else scale)
        if not replay:
            store.append(operand.scale)
        return operand

    fp8.make_operand = make_operand
    try:
        yield
    finally:
        fp8.make_operand = original


@torch.no_grad()
def spread(w, generator):
    """FP32 weights uniformly within the BF16 rounding interval around w: they round to the same BF16 weights."""
    centre = w.to(BF16).float()
    gap = torch.ldexp(torch.ones_like(centre), torch.frexp(centre).exponent - 8)  # between BF16 neighbours
    moved = centre + gap * (torch.rand(w.shape, generator=generator).to(w.device) - 0.5)
    return torch.where(moved.to(BF16) == centre, moved, centre)  # the interval is narrower below a power of two; 0 stays


def load_weights(model, weights, name):
    """Put FP32 master weights into the model in one arithmetic's rounding and dtype, quantisers included."""
    recipe, quantiser, rounded, held = ARITHMETICS[name]
    precision.convert(model, recipe, **quantiser)
    for key, p in model.named_parameters():
        p.data = weights[key].to(rounded).to(held)
    precision.weights_changed(model)


@torch.no_grad()
def score(model, samples, micro_tokens, temperature, shuffle=False):
    """Log-probs and entropies of all answers, (answers, T) FP32 each, 0 past their ends. shuffle: another packing."""
    lengths = [len(s["row"]["prompt_ids"]) + len(s["completion"].token_ids) for s in samples]
    groups = micro_batches(lengths, micro_tokens)
    if shuffle:  # neighbours far apart in length: other padding, other companions
        flat = [i for group in groups for i in group]
        count = len(groups) + 1
        groups = [flat[k::count] for k in range(count) if flat[k::count]]
    logps, entropies = torch.zeros(2, len(samples), max(len(s["completion"].token_ids) for s in samples))
    for group in groups:
        prompts, answers = [samples[i]["row"]["prompt_ids"] for i in group], [samples[i]["completion"].token_ids for i in group]
        logp, entropy = token_logps(model, collate(prompts, answers, 0, model.device), temperature)
        logps[group, : logp.shape[1]], entropies[group, : logp.shape[1]] = logp.cpu(), entropy.cpu()
    return logps, entropies


def kept(path, make):
    """The tensors at `path`, made once; written under another name first, so that a kill leaves no half file."""
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(make(), path + ".tmp")
        os.replace(path + ".tmp", path)
    return torch.load(path, weights_only=True)


def sample(model, tokenizer, weights, rows, args, flags, folder, seed):
    """The seed's answers, recorded in --out: sampled in --rollout-precision with the transformers engine."""
    if not os.path.exists(recorded.path_of(folder, 1)):
        load_weights(model, weights, args.rollout_precision)
        engine = make_engine("hf", model, tokenizer, args.rollout_precision, args.rows)
        sampling = (args.n, args.temperature, args.max_tokens, row_seed(seed, "ratio", 0))
        completions = engine.generate([row["prompt_ids"] for row in rows], *sampling, progress=True)
        texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        rewards = [float(i % 2) for i in range(len(texts))]
        if args.adv == "reward":
            truncated = [c.finish_reason == "length" for c in completions]
            rewards = reward.score([row for row in rows for _ in range(args.n)], texts, truncated)
        samples = [{"row": rows[i // args.n], "completion": c, "text": t, "reward": r}
                   for i, (c, t, r) in enumerate(zip(completions, texts, rewards, strict=True))]
        recorded.save(folder, 1, samples, flags, tokenizer)
    return recorded.load(folder, 1, flags, tokenizer)


def updated(model, weights, samples, flags, lr):
    """[theta_0 .. theta_{M-1}]: master weights before each mini-batch's update by AdamW of size lr; dicts of FP32 tensors."""
    load_weights(model, weights, "fp32")
    precision.convert(model, "bf16")
    masters = precision.Masters(model, BF16)  # clones: `weights` stays as it is
    optimizer = torch.optim.AdamW(masters.parameters(), lr=lr, weight_decay=0.0)
    minis, thetas = split(samples, flags, 0), [weights]
    old_pass(model, minis, flags)
    for mini in minis[:-1]:
        if update(model, masters, optimizer, mini, flags)["skipped"]:
            raise UserError(f"lab.py ratio: an update of size {lr:g} was not finite; use smaller --sizes or --lr")
        thetas.append({name: w.detach().clone() for name, w in masters.weights.items()})
    masters.release()
    return thetas


def moved(thetas):
    """Mean |theta_{M-1} - theta_0| of a weight, and the share of weights whose BF16 rounding changed."""
    first, last = thetas[0], thetas[-1]
    count = sum(w.numel() for w in first.values())
    distance = sum((last[k] - w).abs().sum().item() for k, w in first.items()) / count
    changed = sum((last[k].to(BF16) != w.to(BF16)).sum().item() for k, w in first.items()) / count
    return {"moved": torch.tensor(distance), "changed": torch.tensor(changed)}


def measure(model, weights, samples, names, args, folder, what, lr=None):
    """name -> {"old", "new", "entropy", "moved", "changed"} in each arithmetic, kept in folder/what (old: in folder/oldN, for
    all lr). lr None: new is the old weights in another packing."""
    made, size = [], len(samples) // args.updates
    minis = [samples[k : k + size] for k in range(0, len(samples), size)]

    def thetas():  # made when first asked for: a resumed study may need none
        if not made:
            made.extend(updated(model, weights, samples, args.flags, lr) if lr else [weights] * args.updates)
        return made

    def scored(name, which, stores=None, replay=False, shuffle=False):
        parts = []
        for k, mini in enumerate(minis):
            load_weights(model, which[k], name)  # anew for each: recorded and replayed scales then come in the same order
            with scales(stores[k], replay) if stores else contextlib.nullcontext():
                parts.append(score(model, mini, args.micro_tokens, args.temperature, shuffle))
        T = max(logp.shape[1] for logp, _ in parts)
        return [torch.cat([torch.nn.functional.pad(part[i], (0, T - part[i].shape[1])) for part in parts]) for i in (0, 1)]

    def old(name):
        logp, entropy = scored(name, [weights] * len(minis))
        return {"old": logp, "entropy": entropy}

    def new(name):
        stores = [[] for _ in minis] if name == "row+frozen" else None
        if stores:
            scored(name, [weights] * len(minis), stores)
        return {"new": scored(name, thetas(), stores, replay=True, shuffle=lr is None)[0]} | moved(thetas())

    result = {}
    for name in names:
        start = time.perf_counter()
        first = kept(os.path.join(folder, f"old{len(samples)}", f"{name}.pt"), lambda name=name: old(name))
        result[name] = first | kept(os.path.join(folder, what, f"{name}.pt"), lambda name=name: new(name))
        print(f"{folder} {what} {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return result


def collect(args):
    """Everything the report needs: per seed, `samples`, `main` and `sweep` (lr -> arithmetic -> log-probs), `phantom`."""
    path = tiny.prepare() if args.model == "tiny" else args.model
    model, tokenizer, _ = precision.load_model(path, "fp32", args.device)
    weights, generator = {}, torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        w = p.detach().clone()
        weights[name] = {"spread": lambda w: spread(w, generator), "bf16": lambda w: w.to(BF16).float(),
                         "file": lambda w: w}[args.masters](w)  # fmt: skip
    rows = data.load(args.data, tokenizer, args.max_prompt_tokens)
    if len(rows) < args.prompts * args.seeds:
        raise UserError(f"--data {args.data} has {len(rows)} prompts, --prompts x --seeds needs {args.prompts * args.seeds}")
    seeds = []
    for seed in range(args.seeds):
        folder = os.path.join(args.out, f"seed{seed}")
        own = rows[seed * args.prompts : (seed + 1) * args.prompts]
        samples = sample(model, tokenizer, weights, own, args, args.flags, folder, seed)
        some = samples[: args.sweep_prompts * args.n]
        run = {"samples": samples, "some": some}
        if seed == 0:
            shared = (model, weights, some, PLAIN, args, folder)
            run["sweep"] = {lr: measure(*shared, f"sweep{lr:g}", lr) for lr in args.sizes}
            run["phantom"] = measure(*shared, "phantom")
        names = list(ARITHMETICS) if seed < args.all_seeds else PLAIN
        run["main"] = measure(model, weights, samples, names, args, folder, f"main{args.lr:g}", args.lr)
        seeds.append(run)
    return seeds


def check_same_study(args):
    """Refuse to mix --out's kept measurements with those of other flags; sizes, seeds and --run may grow."""
    path = os.path.join(args.out, "study.json")
    mine = {k: v for k, v in vars(args).items() if k not in ("flags", "out", "run", "seeds", "sizes", "lr", "all_seeds")}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            held = json.load(f)
        odd = [k for k in mine if held.get(k) != mine[k]]
        if odd:
            flag = f"--{odd[0].replace('_', '-')}"
            raise UserError(f"--out {args.out} holds a study with {flag} {held.get(odd[0])}, not {mine[odd[0]]}; use another")
    os.makedirs(args.out, exist_ok=True)
    write_json(path, mine)


def main(argv=None):
    parser = Flags(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="transformers folder, or `tiny`")
    parser.add_argument("--data", default="arith:test", help="prompts, as train_grpo.py's --data")
    parser.add_argument("--prompts", type=number(int, 2), default=16, help="per seed")
    parser.add_argument("--n", type=number(int, 2), default=8, help="answers per prompt")
    parser.add_argument("--max-tokens", type=number(int, 1), default=64)
    parser.add_argument("--max-prompt-tokens", type=number(int, 1), default=512)
    parser.add_argument("--temperature", type=number(float, above=0), default=1.0)
    parser.add_argument("--rollout-precision", default="fp8-row", choices=list(precision.RECIPES))
    parser.add_argument("--masters", choices=["spread", "bf16", "file"], default="spread", help="where FP32 weights start")
    parser.add_argument("--adv", choices=["signs", "reward"], default="signs")
    parser.add_argument("--lr", type=number(float, above=0), default=1e-6, help="size of the main set's updates")
    parser.add_argument("--updates", type=number(int, 2), default=4, help="M, mini-batches of a step")
    parser.add_argument("--sizes", type=number(float, above=0), nargs="*", default=[1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4])
    parser.add_argument("--sweep-prompts", type=number(int, 1), default=2)
    parser.add_argument("--seeds", type=number(int, 1), default=3)
    parser.add_argument("--all-seeds", type=number(int, 0), default=1, help="seeds with every arithmetic; the others: five")
    parser.add_argument("--micro-tokens", type=number(int, 1), default=4096)
    parser.add_argument("--rows", type=number(int, 1), default=128, help="sequences decoded at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--run", nargs="*", default=[], help="training runs with --clip calibrated: their bounds over time")
    parser.add_argument("--out", default="out/ratio")
    args = parser.parse_args(argv)
    check_device(args.device)
    for flag, N in (("--prompts", args.prompts * args.n), ("--sweep-prompts", args.sweep_prompts * args.n)):
        if N % args.updates or N > args.prompts * args.n:
            raise UserError(f"{flag} x --n {args.n} = {N} answers do not split into --updates {args.updates} mini-batches")
    check_same_study(args)
    shared = ["--model", args.model, "--precision", "bf16", "--correction", "none", "--clip-low", "0", "--clip-high", "1e9"]
    shared += ["--rollout-precision", args.rollout_precision]
    shared += ["--updates-per-step", str(args.updates), "--prompts-per-step", str(args.prompts), "--group-size", str(args.n)]
    shared += ["--micro-tokens", str(args.micro_tokens), "--temperature", str(args.temperature), "--device", args.device]
    args.flags = parse_flags([*shared, "--max-tokens", str(args.max_tokens)])
    ratio_report.report(collect(args), args)


if __name__ == "__main__":
    run_main(main)
