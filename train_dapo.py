"""DAPO (arXiv:2503.14476) in low precision: what it changes in the loop of train_grpo.py, and nothing else.

    clip-higher         clip(r, 0.8, 1.28): unlikely tokens may grow further; Calibrated Clipping aligns to these    (flags)
    token mean          a token counts the same in a long and in a short answer, over the whole mini-batch           (flags)
    no KL                                                                                                            (flags)
    reward              R = 2 acc - 1 + R_len, acc 0 or 1                                                            (1)
    soft overlong       R_len = 0                                       |y| <= L_max - L_cache, in tokens            (2)
                                (L_max - L_cache - |y|) / L_cache       up to L_max
                                -1                                      beyond
    overlong filtering  an answer cut off at --max-tokens is left out of the loss, but stays in its group's mean     (off)
    dynamic sampling    all right or all wrong teaches nothing: sample until B groups are mixed                      (3)

(3) looks at accuracy, before (1): lengths differ in every group, so that shaped rewards are hardly ever all equal, and a group
of right answers with penalties would stay and teach brevity alone. Rounds of --gen-prompts prompts, whole groups, in the order
drawn; the first B mixed ones are the batch, the rest of the last round is dropped (they would be off-policy later). After
--max-gen-batches rounds without B groups the run ends, with a checkpoint: the data are too easy or too hard.

Worked number: L_max 20, L_cache 4: 16 tokens cost 0, 18 cost 0.5, 20 and more cost 1. A right answer of 18 tokens has
R = 1 - 0.5 = 0.5, a wrong one cut off at 20 has R = -1 - 1 = -2.

Defaults are the paper's: 512 prompts x 16 answers, 16 updates, lr 1e-6, answers of 20,480 tokens of which the last 4,096 are
punished; 10 warm-up steps (the paper: 20) and weight decay 0.1 are verl's scripts', as is --dual-clip 10, here off. Other
flags: train_grpo.py's.

Metrics beside the loop's: `reward` is (1), `acc` the plain accuracy, both of the batch, whose groups are all mixed; dapo/acc
the accuracy of everything sampled, which GRPO's `acc` compares with; dapo/rounds; dapo/efficiency, the batch's share of the
groups sampled; dapo/{all0,all1}, shares of the groups sampled; dapo/surplus, mixed groups dropped;
dapo/overlong_frac, answers punished; dapo/overlong, mean R_len over all answers; dapo/filtered, answers left out.

    python train_dapo.py --preset demo                          embedded model, sums, minutes on a 2-core CPU, ends in a picture
    accelerate launch --num_processes 8 train_dapo.py --model Qwen/Qwen3-14B-Base --data dapo-math-17k --engine vllm \\
        --precision fp8-row --clip calibrated --activation-checkpointing --out out/dapo

Departures
    The paper does not say how many prompts a round has; verl's scripts take three times the batch. Here: the batch's number.
    With a reward of your own (--reward, in 0 .. 1) R = 2 r - 1 + R_len, and acc is r > 0.5.
"""

import argparse

from errors import Everywhere, UserError, number, run_main
from flags import PRESETS, parse_flags
from rollout import row_seed
from train_grpo import add_advantages, sample_and_grade, train

PAPER = dict(
    prompts_per_step=512, group_size=16, updates_per_step=16, max_tokens=20480, lr=1e-6, warmup=10, weight_decay=0.1,
    overlong_cache=4096,
)  # fmt: skip
ROUNDS = 10  # verl's
DEMO = dict(out="out/dapo", warmup=0, overlong_cache=12)


def add_dapo_flags(parser):
    g = parser.add_argument_group("DAPO")
    g.add_argument("--dynamic-sampling", action=argparse.BooleanOptionalAction, default=True, help="mixed groups only")
    g.add_argument("--gen-prompts", type=number(int, 0), default=0, help="prompts a sampling round; 0 = --prompts-per-step")
    g.add_argument("--max-gen-batches", type=number(int, 1), default=ROUNDS, help="sampling rounds a step at most")
    g.add_argument("--overlong-max", type=number(int, 0), default=0, help="L_max, tokens; 0 = --max-tokens")
    g.add_argument("--overlong-cache", type=number(int, 0), help="L_cache, tokens before L_max that are punished; 0 = off")
    g.add_argument("--overlong-filter", action="store_true", help="no loss on answers cut off at --max-tokens")
    parser.set_defaults(clip_high=1.28, **PAPER)


def check(args):
    """The flags of this file against each other and the loop's; fills in what 0 stands for."""
    args.overlong_max = args.overlong_max or args.max_tokens
    args.gen_prompts = args.gen_prompts or args.prompts_per_step
    if args.overlong_cache > args.overlong_max:
        raise UserError(f"--overlong-cache {args.overlong_cache} is longer than the whole answer, {args.overlong_max} tokens "
                        "(--overlong-max, or --max-tokens); lower it, or 0 for no punishment")
    idle = {"gen_prompts": args.gen_prompts != args.prompts_per_step, "max_gen_batches": args.max_gen_batches != ROUNDS}
    for name in [name for name, given in idle.items() if given and not args.dynamic_sampling]:
        flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
        raise UserError(f"{flag} has no effect with --no-dynamic-sampling; leave one of the two out")
    if not args.overlong_cache and args.overlong_max != args.max_tokens:
        raise UserError(f"--overlong-max {args.overlong_max} has no effect with --overlong-cache 0; leave one of the two out")
    if args.overlong_cache and args.overlong_max - args.overlong_cache >= args.max_tokens:
        raise UserError(f"--overlong-max {args.overlong_max} less --overlong-cache {args.overlong_cache} is not below "
                        f"--max-tokens {args.max_tokens}: nothing would be punished; leave --overlong-max out")
    if args.load_rollouts and args.overlong_filter:
        raise UserError("--overlong-filter has no effect with --load-rollouts: the recording run's choice is in the records")
    if args.load_rollouts and args.dynamic_sampling:
        raise UserError("--load-rollouts trains on recorded batches as they are; add --no-dynamic-sampling")
    return args


def soft_overlong(length, longest, cache):
    """(2): the punishment of an answer of `length` tokens, between -1 and 0."""
    if not cache or length <= longest - cache:
        return 0.0
    return max(-1.0, (longest - cache - length) / cache)


def shape(samples, args):
    """(1), (2) and overlong filtering, in place; returns the metrics."""
    penalties = []
    for s in samples:
        penalties.append(soft_overlong(len(s["completion"].token_ids), args.overlong_max, args.overlong_cache))
        s["reward"] = 2 * s["reward"] - 1 + penalties[-1]  # NaN stays NaN
        s["left_out"] = args.overlong_filter and s["completion"].finish_reason == "length"
    n = len(samples)
    return {"dapo/overlong": sum(penalties) / n, "dapo/overlong_frac": sum(p < 0 for p in penalties) / n,
            "dapo/filtered": sum(s["left_out"] for s in samples) / n}


def kind(group):
    """all0, all1 or mixed, by the accuracies of answers that have one; without any: all0, there is nothing to learn."""
    accs = {s["acc"] for s in group if s["acc"] == s["acc"]}
    return "mixed" if len(accs) > 1 else "all1" if accs == {1.0} else "all0"


def collect(run, args, step, sec):
    """(3): the samples of a step's B mixed groups, shaped, with advantages; and the metrics."""
    B, G = args.prompts_per_step, args.group_size
    kept, kinds, accs, rounds = [], [], [], 0
    while len(kept) < B:
        if rounds == args.max_gen_batches:
            all0, all1 = (f"{kinds.count(k) / len(kinds):.0%} all" for k in ("all0", "all1"))
            hard = "--data is too easy or too hard for this model"
            raise Everywhere(
                f"step {step}: {len(kinds)} groups sampled, {len(kept)} of them mixed, --prompts-per-step asks for {B}: "
                f"--max-gen-batches {rounds} is reached; {all0} wrong, {all1} right: "
                + (hard if 5 * len(kept) < len(kinds) else "raise --max-gen-batches or --gen-prompts")
            )
        rows = run.shuffled.next(args.gen_prompts)
        samples = sample_and_grade(run, rows, args, row_seed(args.seed, f"train {step}", rounds), sec)
        groups = [samples[i : i + G] for i in range(0, len(samples), G)]
        kinds += [kind(group) for group in groups]
        accs += [s["acc"] for s in samples if s["acc"] == s["acc"]]
        kept += [g for g in groups if kind(g) == "mixed" or not args.dynamic_sampling]
        rounds += 1
    samples = [s for group in kept[:B] for s in group]
    metrics = {"dapo/rounds": rounds, "dapo/efficiency": B / len(kinds), "dapo/surplus": len(kept) - B}
    metrics |= {f"dapo/{k}": kinds.count(k) / len(kinds) for k in ("all0", "all1")} | shape(samples, args)
    metrics["dapo/acc"] = sum(accs) / max(1, len(accs))
    add_advantages(samples, args)
    return samples, metrics


if __name__ == "__main__":
    presets = {name: flags | DEMO for name, flags in PRESETS.items()}
    run_main(lambda: train(check(parse_flags(doc=__doc__, presets=presets, extend=add_dapo_flags)), collect))
