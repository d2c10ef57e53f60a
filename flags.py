"""The training scripts' flags: presets, groups, and the checks of one flag against another, before anything is loaded.

    args = parse_flags(argv)      # an argparse namespace; explicit flags beat --preset; mistakes are UserErrors
"""

import os

import torch

import clipping
import precision
from errors import Flags, UserError, json_object, number

PRESETS = {
    "demo": dict(
        model="tiny", data="arith:train", eval_data="arith:test", out="out/demo", steps=40, prompts_per_step=32, group_size=8,
        updates_per_step=4, max_tokens=40, lr=5e-5, precision="fp8-row", eval_every=20, save_every=20,
    ),
}  # fmt: skip
CORRECTIONS = ("none", "tis", "icepop", "mis")


def add_method_flags(parser):
    """Precision and method: what the studies vary."""
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
    g.add_argument("--icepop-low", type=number(float, 0, 1), default=0.5, help="band of w outside which tokens are dropped")
    g.add_argument("--icepop-high", type=number(float, above=1), default=5.0)
    g.add_argument("--mis-low", type=number(float, 0, 1), default=0.999, help="band of the geometric mean of w per answer")
    g.add_argument("--mis-high", type=number(float, above=1), default=1.001)
    g.add_argument("--loss-agg", choices=clipping.AGGS, default="token-mean")
    g.add_argument("--adv-scale", choices=["std", "none"], default="std", help="none: not divided by the std (Dr.GRPO)")


def make_parser(description):
    parser = Flags(description=description)
    g = parser.add_argument_group("model and data")
    g.add_argument("--model", default="tiny", help="transformers folder or hub name; `tiny` makes the embedded model")
    g.add_argument("--data", default="arith:train", help="arith:train, rg:TASK, a preset (gsm8k:train), a file, OWNER/NAME")
    g.add_argument("--eval-data", default="", help="held-out problems, same forms as --data")
    g.add_argument("--prompt-column", help="default: the preset's, else prompt")
    g.add_argument("--answer-column", help="default: the preset's, else answer")
    g.add_argument("--system-prompt", help="for models with a chat template")
    g.add_argument("--template-args", type=json_object, help='arguments of the chat template, e.g. {"enable_thinking": false}')
    g.add_argument("--prompt-format", help="for models without a chat template, with {prompt}; default: the prompt alone")
    g.add_argument("--reward", default="", help="FILE.py:function(completion, row, truncated) instead of math grading")
    g.add_argument("--max-prompt-tokens", type=number(int, 1), default=1024, help="longer prompts are dropped, with a count")
    g = parser.add_argument_group("run")
    g.add_argument("--out", default="out/run", help="run folder")
    g.add_argument("--preset", choices=list(PRESETS), help="a set of flags; flags given explicitly win")
    g.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0)
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
    g.add_argument("--engine", choices=["hf", "vllm"], default="hf", help="transformers, or real vLLM (CPU too)")
    g.add_argument("--rollout-kernels", choices=["aligned", "native"], default="aligned",
                   help="vllm: the learner's own quantiser, or vLLM's FP8 kernels (GPU)")
    g.add_argument("--max-tokens", type=number(int, 1), default=128, help="tokens per answer")
    g.add_argument("--temperature", type=number(float, 0), default=1.0)
    g.add_argument("--rollout-rows", type=number(int, 1), default=256, help="sequences decoded at once")
    g.add_argument("--gate", type=number(float, 0), help="bound on step 0's mean |old_logp - mu_logp|; 0 = report only")
    g = parser.add_argument_group("optimiser")
    g.add_argument("--lr", type=number(float, above=0), default=1e-6, help="constant after --warmup")
    g.add_argument("--warmup", type=number(int, 0), default=0, help="steps of linear warm-up")
    g.add_argument("--weight-decay", type=number(float, 0), default=0.01)
    g.add_argument("--grad-clip", type=number(float, above=0), default=1.0, help="bound on the gradient's global norm")
    add_method_flags(parser)
    return parser


def check_without_effect(args, parser):
    """Refuse flags that were set but do nothing next to another: naming both beats a run that was not what it seemed."""
    fp8 = any(precision.RECIPES[r]["granularity"] for r in (args.precision, args.rollout_precision))
    idle = {"tis_cap": args.correction == "tis", "tis_level": args.correction == "tis"}
    idle |= {f"{name}_{end}": args.correction == name for name in ("icepop", "mis") for end in ("low", "high")}
    idle |= dict.fromkeys(("fp8_backend", "fp8_grads", "pow2_scales", "keep_bf16"), fp8)
    for name, used in idle.items():
        if not used and getattr(args, name) != parser.get_default(name):
            of_fp8 = name.startswith(("fp8", "pow2", "keep"))
            other = f"--precision {args.precision}" if of_fp8 else f"--correction {args.correction}"
            raise UserError(f"--{name.replace('_', '-')} has no effect with {other}; leave one of the two out")


def parse_flags(argv=None, doc=__doc__):
    """Flags with the preset's values as defaults, checked against each other before anything is loaded."""
    parser = make_parser(doc.splitlines()[0])
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
    if args.rollout_kernels == "native" and args.engine != "vllm":
        raise UserError("--rollout-kernels native is vLLM's; it needs --engine vllm")
    check_without_effect(args, parser)
    if args.temperature == 0:
        raise UserError("--temperature 0 samples a group of equal answers, which teaches nothing; use 1.0")
    if not args.clip_low < 1 < args.clip_high:
        bounds = f"--clip-low {args.clip_low} and --clip-high {args.clip_high}"
        raise UserError(f"{bounds} bound a ratio: low < 1 < high, e.g. 0.8 and 1.24")
    if args.dual_clip and args.dual_clip <= args.clip_high:
        raise UserError(f"--dual-clip {args.dual_clip} must be above --clip-high {args.clip_high}; 0 switches it off")
    if args.eval_every and not args.eval_data:
        args.eval_every = 0  # nothing to evaluate on: printed with the other flags
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise UserError("started with WORLD_SIZE > 1: training on several processes is not built yet; run one process")
    return args
