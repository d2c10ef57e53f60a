"""The training scripts' flags: presets, groups, and the checks of one flag against another, before anything is loaded.

    args = parse_flags(argv)      # an argparse namespace; explicit flags beat --preset; mistakes are UserErrors

train_dapo.py adds flags and presets of its own (`extend`, `presets`), and other defaults.
"""

import torch

import clipping
import parallel
import precision
from errors import Flags, UserError, json_object, number
from learner import make_calibration

PRESETS = {
    "demo": dict(
        model="tiny", data="arith:train", eval_data="arith:test", out="out/demo", steps=40, prompts_per_step=32, group_size=8,
        updates_per_step=4, max_tokens=40, lr=5e-5, precision="fp8-row", eval_every=20, save_every=20,
    ),
}  # fmt: skip
CORRECTIONS = ("none", "tis", "icepop", "mis", "acrl")


def add_method_flags(parser):
    """Precision and method: what the studies vary."""
    g = parser.add_argument_group("precision")
    g.add_argument("--precision", default="fp8-row", help=", ".join(precision.RECIPES))
    g.add_argument("--rollout-precision", help="the sampler's; default: the learner's")
    g.add_argument("--fp8-backend", choices=["emulate", "scaled_mm"], help="default: scaled_mm on a GPU, emulate on a CPU")
    g.add_argument("--fp8-grads", choices=list(precision.GRAD_DTYPES), default="e4m3", help="format of gradients")
    g.add_argument("--pow2-scales", action="store_true", help="round FP8 scales up to powers of two")
    g.add_argument("--activations", choices=["bf16", "fp32"], default="bf16",
                   help="all but the linear layers' operands, both sides; fp32 all but closes the sampler-learner gap")
    g.add_argument("--keep-bf16", default="", help="decoder layers left in BF16 by position, e.g. first:1,last:1")
    g = parser.add_argument_group("method")
    g.add_argument("--objective", choices=["token", "cispo"], default="token", help="cispo: the clipped ratio is a weight")
    g.add_argument("--clip", choices=["vanilla", "calibrated", "bapo"], default="vanilla",
                   help="fixed bounds; bounds calibrated on BF16 shadow passes; bounds searched per mini-batch")
    g.add_argument("--clip-low", type=number(float, 0), help="lower bound of the ratio, 0.8, cispo: 0; calibrated: BF16's")
    g.add_argument("--clip-high", type=number(float, 0), help="upper bound of the ratio, 1.24, DAPO 1.28; calibrated: BF16's")
    g.add_argument("--bapo-target", type=number(float, above=0), default=0.4, help="rho0, the positive tokens' part")
    g.add_argument("--dual-clip", type=number(float, 0), default=0.0, help="bound on r where A < 0, e.g. 3; 0 = off")
    g.add_argument("--kl-coef", type=number(float, 0), default=0.0, help="weight of the KL to --model in the loss; 0 = none")
    g.add_argument("--kl-estimator", choices=["k3", "k2", "k1"], default="k3", help="see clipping.kl_loss: gradients differ")
    g.add_argument("--correction", choices=CORRECTIONS, default="tis", help="sampler against learner")
    g.add_argument("--tis-cap", type=number(float, above=0), default=2.0)
    g.add_argument("--tis-level", choices=["token", "sequence"], default="token")
    g.add_argument("--icepop-low", type=number(float, 0, 1), default=0.5, help="band of w outside which tokens are dropped")
    g.add_argument("--icepop-high", type=number(float, above=1), default=5.0)
    g.add_argument("--mis-low", type=number(float, 0, 1), default=0.999, help="band of the geometric mean of w per answer")
    g.add_argument("--mis-high", type=number(float, above=1), default=1.001)
    g.add_argument("--acrl-gamma", type=number(float, above=0), default=0.65, help="gain of the controller")
    g.add_argument("--acrl-baseline", type=number(int, 1), default=8, help="steps whose mean gap is the set point")
    g.add_argument("--acrl-distance", choices=["prob", "logp"], default="prob")
    g.add_argument("--loss-agg", choices=clipping.AGGS, default="token-mean")
    g.add_argument("--adv-scale", choices=["std", "none"], default="std", help="none: not divided by the std (Dr.GRPO)")


def add_calibration_flags(parser):
    """Calibrated Clipping: the paper's choice is the default, the rest are ablations (calibrated.py)."""
    g = parser.add_argument_group("calibrated clipping")
    g.add_argument("--calib-interval", type=number(int, 1), default=20, help="steps between calibrations; the first is step 1")
    g.add_argument("--calib-init", type=number(float, 0), nargs=2, default=[0.6, 1.8], metavar=("LOW", "HIGH"))
    g.add_argument("--calib-delta", type=number(float, 0), nargs=2, default=[0.05, 0.1], metavar=("LOW", "HIGH"),
                   help="most that a bound moves at a calibration")
    g.add_argument("--calib-range-low", type=number(float, 0, 1), nargs=2, default=[0.5, 0.9], metavar=("FROM", "TO"))
    g.add_argument("--calib-range-high", type=number(float, 1), nargs=2, default=[1.2, 2.0], metavar=("FROM", "TO"))
    g.add_argument("--calib-stages", choices=["both", "lower", "upper"], default="both")
    g.add_argument("--calib-lower", choices=["grid", "quantile"], default="grid")
    g.add_argument("--calib-upper", choices=["rho", "tail", "inverse", "proportion"], default="rho")
    g.add_argument("--calib-pool", type=number(int, 1), default=1, help="calibrations whose statistics are solved together")
    g.add_argument("--calib-share", type=number(float, above=0, high=1), default=1.0, help="share of answers in shadow passes")
    g.add_argument("--calib-freeze-after", type=number(int, 0), default=0, help="calibrations; 0 = never")
    g.add_argument("--calib-no-pi-samp", action="store_true", help="rho without the sampler's probability")
    g.add_argument("--calib-reference", choices=["bf16", "fp32"], default="bf16", help="precision of the shadow passes")
    g.add_argument("--shadow-every", type=number(int, 0), default=0, help="other clips: steps between measuring passes")


def add_run_flags(parser, presets):
    """The run as such: folder, seed, checkpoints, evaluation, logs."""
    g = parser.add_argument_group("run")
    g.add_argument("--out", default="out/run", help="run folder")
    g.add_argument("--preset", choices=list(presets), help="a set of flags; flags given explicitly win")
    g.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0)
    g.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    g.add_argument("--dry-run", action="store_true", help="resolve flags, load model and data, stop before sampling")
    g.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out; --steps stays the total")
    g.add_argument("--auto-resume", action="store_true", help="--resume if there is a checkpoint, else start: requeued jobs")
    g.add_argument("--save-every", type=number(int, 0), default=50, help="steps between checkpoints; 0 = only the last")
    g.add_argument("--keep-last", type=number(int, 0), default=2, help="checkpoints kept; 0 = all")
    g.add_argument("--eval-every", type=number(int, 0), default=50, help="steps; also before and after; 0 = never")
    g.add_argument("--eval-problems", type=number(int, 2), default=200)
    g.add_argument("--eval-n", type=number(int, 1), default=4, help="answers per held-out problem")
    g.add_argument("--log-samples", type=number(int, 0), default=16, help="answers a step in samples.jsonl")
    g.add_argument("--keep-best", action="store_true", help="save whenever held-out accuracy is the best so far, and keep that")
    g.add_argument("--save-before-seconds", type=number(float, 0), default=0.0,
                   help="wall-clock limit: save and stop before it, exit code 0; 0 = none. SIGTERM and Ctrl-C save too")
    g.add_argument("--tensorboard", action="store_true")
    g.add_argument("--wandb", action="store_true", help="also log there; absent or without a login, the run goes on")
    g.add_argument("--save-rollouts", action="store_true", help="keep every step's answers in --out/rollouts")
    g.add_argument("--load-rollouts", default="", metavar="DIR", help="train on recorded answers instead of sampling")


def make_parser(description, presets):
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
    add_run_flags(parser, presets)
    g = parser.add_argument_group("batch")
    g.add_argument("--steps", type=number(int, 1), default=500, help="total, also with --resume")
    g.add_argument("--prompts-per-step", type=number(int, 1), default=32, help="B; each gets a group of answers")
    g.add_argument("--group-size", type=number(int, 1), default=8, help="answers per prompt, at least 2")
    g.add_argument("--updates-per-step", type=number(int, 1), default=4, help="mini-batches a step")
    g.add_argument("--micro-tokens", type=number(int, 1), default=16384, help="padded tokens per forward and backward")
    g = parser.add_argument_group("memory")
    g.add_argument("--activation-checkpointing", action="store_true", help="keep decoder layers' inputs only; slower")
    g.add_argument("--cpu-offload", action="store_true", help="several processes: sharded weights and AdamW in CPU memory")
    g = parser.add_argument_group("sampling")
    g.add_argument("--engine", choices=["hf", "vllm"], default="hf", help="transformers, or real vLLM (CPU too)")
    g.add_argument("--rollout-kernels", choices=["aligned", "native", "exact"], default="aligned",
                   help="vllm: the learner's own quantiser, or vLLM's FP8 kernels (GPU); hf: exact = bit-equal (exact.py)")
    g.add_argument("--vllm-memory", type=number(float, above=0, high=1), default=0.4, help="share of the GPU's memory for vLLM")
    g.add_argument("--vllm-sleep", type=number(int, 0, 2), default=2,
                   help="vLLM on a GPU while the learner trains: 2 drops its weights, 1 parks them in CPU memory, 0 stays")
    g.add_argument("--vllm-compile", action="store_true", help="faster after a slow start; rounds less like the learner")
    g.add_argument("--vllm-tp", type=number(int, 1), default=1, help="GPUs, one process each, that share one vLLM engine")
    g.add_argument("--sync-check-every", type=number(int, 0), default=10,
                   help="steps between comparisons of the engine's weights with the learner's; also at start; 0 = only then")
    g.add_argument("--max-tokens", type=number(int, 1), default=128, help="tokens per answer")
    g.add_argument("--temperature", type=number(float, 0), default=1.0)
    g.add_argument("--rollout-rows", type=number(int, 1), default=256, help="sequences decoded at once")
    g.add_argument("--gate", type=number(float, 0), help="bound on a launch's first mean |old_logp - mu_logp|; 0 = report only")
    g = parser.add_argument_group("optimiser")
    g.add_argument("--lr", type=number(float, above=0), default=1e-6, help="constant after --warmup, or see --lr-schedule")
    g.add_argument("--warmup", type=number(int, 0), default=0, help="steps of linear warm-up")
    g.add_argument("--lr-schedule", choices=["constant", "linear", "cosine"], default="constant", help="after the warm-up")
    g.add_argument("--lr-decay-steps", type=number(int, 0), default=0, help="step at which the decay ends, whatever --steps is")
    g.add_argument("--lr-min-ratio", type=number(float, 0, 1), default=0.0, help="where it ends, as a share of --lr")
    g.add_argument("--weight-decay", type=number(float, 0), default=0.01, help="AdamW's")
    g.add_argument("--grad-clip", type=number(float, above=0), default=1.0, help="bound on the gradient's global norm")
    add_method_flags(parser)
    add_calibration_flags(parser)
    return parser


def check_without_effect(args, parser):
    """Refuse flags that were set but do nothing next to another: naming both beats a run that was not what it seemed."""
    fp8 = any(precision.RECIPES[r]["granularity"] for r in (args.precision, args.rollout_precision))
    idle = {"tis_cap": args.correction == "tis", "tis_level": args.correction == "tis"}
    idle |= {f"{name}_{end}": args.correction == name for name in ("icepop", "mis") for end in ("low", "high")}
    idle |= dict.fromkeys(("fp8_backend", "fp8_grads", "pow2_scales", "keep_bf16"), fp8)
    idle |= dict.fromkeys(("vllm_memory", "vllm_sleep", "vllm_tp", "vllm_compile"), args.engine == "vllm")
    idle |= dict.fromkeys(("acrl_gamma", "acrl_baseline", "acrl_distance"), args.correction == "acrl")
    calibrated, shadow = args.clip == "calibrated", args.clip == "calibrated" or args.shadow_every > 0
    idle |= {name: calibrated for name in vars(args) if name.startswith("calib_")}
    idle |= {"calib_share": shadow, "calib_reference": shadow}
    idle["calib_upper"] = calibrated and args.calib_stages != "lower"
    idle["calib_lower"] = calibrated and args.calib_stages != "upper"
    idle["calib_range_low"] = calibrated and args.calib_lower == "grid"
    idle |= dict.fromkeys(("clip_low", "clip_high"), args.clip != "bapo")
    on_gpu = args.engine == "vllm" and torch.device(args.device).type == "cuda"
    idle |= {"vllm_memory": on_gpu, "vllm_sleep": on_gpu}
    idle |= {"bapo_target": args.clip == "bapo", "shadow_every": not calibrated, "kl_estimator": args.kl_coef > 0}
    idle |= dict.fromkeys(("lr_decay_steps", "lr_min_ratio"), args.lr_schedule != "constant")
    for name, used in idle.items():
        if not used and getattr(args, name) != parser.get_default(name):
            of_fp8 = name.startswith(("fp8", "pow2", "keep"))
            other = f"--precision {args.precision}" if of_fp8 else f"--correction {args.correction}"
            other = f"--engine {args.engine} on {args.device}" if name.startswith("vllm") else other
            other = f"--clip {args.clip}" if name.startswith(("calib", "bapo", "shadow", "clip")) else other
            other = f"--lr-schedule {args.lr_schedule}" if name.startswith("lr") else other
            other = f"--kl-coef {args.kl_coef:g}" if name.startswith("kl") else other
            if calibrated and name in ("calib_upper", "calib_lower"):
                other = f"--calib-stages {args.calib_stages}"
            elif calibrated and name == "calib_range_low":
                other = f"--calib-lower {args.calib_lower}"
            raise UserError(f"--{name.replace('_', '-')} has no effect with {other}; leave one of the two out")


def check_exact(args):
    """--rollout-kernels exact: one transformers module on both sides, FP8 codes multiplied in FP64."""
    if args.engine != "hf":
        raise UserError(f"--rollout-kernels exact is the transformers engine's, not --engine {args.engine}'s; use --engine hf")
    if args.rollout_precision != args.precision:
        recipes = f"--rollout-precision {args.rollout_precision} differs from --precision {args.precision}"
        raise UserError(f"--rollout-kernels exact makes two equal sides bit-equal, but {recipes}; leave one of them out")
    if args.precision == "fp8-tensor":
        raise UserError("--rollout-kernels exact and --precision fp8-tensor: its scale is the whole batch's, so that a row "
                        "depends on its neighbours; use fp8-row or fp8-block")
    if args.fp8_backend == "scaled_mm":
        raise UserError("--rollout-kernels exact multiplies codes in FP64, which --fp8-backend scaled_mm cannot; leave one out")
    if precision.RECIPES[args.precision]["granularity"]:
        args.fp8_backend = "emulate"


def check_method(args):
    """Pairs of --objective, --clip, --dual-clip and the rest that cannot go together."""
    if args.objective == "cispo" and args.clip != "vanilla":
        raise UserError(f"--objective cispo clips the ratio itself, --clip {args.clip} the update; leave one of the two out")
    if args.objective == "cispo" and args.dual_clip:
        raise UserError(f"--objective cispo has no clipped update for --dual-clip {args.dual_clip}; leave one of the two out")
    if args.clip == "calibrated" and args.updates_per_step == 1:
        raise UserError("--clip calibrated with --updates-per-step 1: the ratio is 1 and there is nothing to align; use 4")
    if args.load_rollouts and args.engine == "vllm":
        raise UserError("--engine vllm samples, --load-rollouts does not; leave one of the two out")
    if args.lr_schedule != "constant" and args.lr_decay_steps <= args.warmup:
        raise UserError(f"--lr-schedule {args.lr_schedule} needs --lr-decay-steps above --warmup {args.warmup}: the step at "
                        "which the decay ends")
    if args.lr_schedule != "constant" and args.steps > args.lr_decay_steps and not args.lr_min_ratio:
        raise UserError(f"--steps {args.steps} goes past --lr-decay-steps {args.lr_decay_steps}, where the learning rate is "
                        "0; raise the latter, or set --lr-min-ratio")
    if args.keep_best and not (args.eval_every and args.eval_data):
        raise UserError("--keep-best goes by held-out accuracy; it needs --eval-every and --eval-data")
    if args.engine == "vllm" and args.device not in ("cpu", "cuda", "cuda:0"):
        number = args.device.removeprefix("cuda:")
        raise UserError(f"--engine vllm takes the first GPU it sees, not --device {args.device}; "
                        f"set CUDA_VISIBLE_DEVICES={number} and --device cuda")
    if args.load_rollouts and args.save_rollouts:
        raise UserError("--save-rollouts would copy what --load-rollouts reads; leave one of the two out")


def check_activations(args):
    """--activations fp32: what it cannot go with."""
    for flag in ("precision", "rollout_precision"):
        if getattr(args, flag) == "fp32":
            raise UserError(f"--activations fp32 has no effect with --{flag.replace('_', '-')} fp32; leave one of the two out")
    fp8 = any(precision.RECIPES[r]["granularity"] for r in (args.precision, args.rollout_precision))
    if fp8 and args.fp8_backend == "scaled_mm":
        raise UserError("--activations fp32 and --fp8-backend scaled_mm, whose kernels write BF16: leave one of the two out")
    args.fp8_backend = "emulate" if fp8 else args.fp8_backend
    if args.rollout_kernels == "native":
        raise UserError("--activations fp32 and --rollout-kernels native: vLLM's FP8 kernels write BF16; use aligned")


def check_processes(args):
    """What several processes cannot do, or can alone. The launcher says how many there are."""
    world = parallel.launched()
    if args.vllm_tp > 1 and world % args.vllm_tp:
        raise UserError(f"--vllm-tp {args.vllm_tp} needs a multiple of {args.vllm_tp} processes, found {world}: "
                        f"accelerate launch --num_processes {args.vllm_tp} ...")
    if args.cpu_offload and (world == 1 or args.device == "cpu"):
        raise UserError("--cpu-offload moves the shards of several GPU processes into CPU memory; leave it out")
    if world == 1:
        return
    if args.device not in ("cpu", "cuda"):
        raise UserError(f"--device {args.device} with {world} processes: each takes the GPU of its number; use --device cuda")
    size = args.prompts_per_step * args.group_size // args.updates_per_step
    if size < world:
        raise UserError(f"--updates-per-step {args.updates_per_step} leaves mini-batches of {size} answers for {world} "
                        "processes; lower it, or raise --prompts-per-step")
    if args.rollout_kernels == "exact":
        raise UserError(f"--rollout-kernels exact runs sampler and learner in one module, which {world} processes shard; "
                        "use one process")
    wide = args.precision == "fp32" or args.activations == "fp32"
    if (args.clip == "calibrated" or args.shadow_every) and (args.calib_reference == "fp32") != wide:
        other = "--activations fp32" if args.activations == "fp32" else f"--precision {args.precision}"
        raise UserError(f"--calib-reference {args.calib_reference} with {other} on {world} processes: sharded weights cannot "
                        f"change their dtype; use --calib-reference {'fp32' if wide else 'bf16'}, or one process")


def parse_flags(argv=None, doc=__doc__, presets=PRESETS, extend=None):
    """Flags with the preset's values as defaults, checked against each other before anything is loaded."""
    parser = make_parser(doc.splitlines()[0], presets)
    if extend:
        extend(parser)
    args = parser.parse_args(argv)
    if args.preset:
        parser.set_defaults(**presets[args.preset])
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
    args.clip_low = (0.0 if args.objective == "cispo" else 0.8) if args.clip_low is None else args.clip_low
    args.clip_high = 1.24 if args.clip_high is None else args.clip_high
    if args.rollout_kernels == "exact":
        check_exact(args)
    if args.activations == "fp32":
        check_activations(args)
    check_method(args)
    if args.temperature == 0:
        raise UserError("--temperature 0 samples a group of equal answers, which teaches nothing; use 1.0")
    if not args.clip_low < 1 < args.clip_high:
        bounds = f"--clip-low {args.clip_low} and --clip-high {args.clip_high}"
        raise UserError(f"{bounds} bound a ratio: low < 1 < high, e.g. 0.8 and 1.24")
    if args.dual_clip and args.dual_clip <= args.clip_high:
        raise UserError(f"--dual-clip {args.dual_clip} must be above --clip-high {args.clip_high}; 0 switches it off")
    make_calibration(args)  # its own checks, before anything is loaded
    if args.eval_every and not args.eval_data:
        args.eval_every = 0  # nothing to evaluate on: printed with the other flags
    check_processes(args)
    return args
