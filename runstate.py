"""What a run carries from step to step, and how it is saved and taken up again: exactly, on any number of processes.

    run = setup(args)                         model, masters, optimizer, engine, data: nothing is written yet
    run.state = state_of(run, args, step)     counters, data position, every random generator, the method's state: plain JSON
    save(run, args)                           a checkpoint folder (checkpoint.py): state, FP32 masters, AdamW's moments
    restore(run, path, args)                  all of it back; flags come from the command line, and what changed is printed

`state_of` is taken at a step's end. A run that is stopped while it samples the next step saves that state: the weights have not
moved since, the prompts drawn meanwhile are drawn again.

Sharded tensors are gathered one by one and kept by rank 0 alone, which writes; on the way back every rank reads the files
through memory maps and keeps its part. So a checkpoint does not know how many processes wrote it.
"""

import copy
import random
from functools import partial
from types import SimpleNamespace

import numpy
import torch

import acrl
import checkpoint
import data
import exact
import parallel
import precision
import recorded
import reward
import tiny
from errors import Everywhere, UserError
from learner import make_calibration
from logprob import check_head
from rollout import make_engine


def setup(args):
    """Everything a run holds: model, tokenizer, masters, optimizer, engine, data; nothing is written yet."""
    function = reward.load_function(args.reward) if args.reward else None
    if args.load_rollouts:
        recorded.check(args.load_rollouts, args)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(args.seed % 2**32)  # nothing of ours draws from the global generators; a library or a reward function might
    sharded = parallel.world() > 1
    path = parallel.on_main(tiny.prepare) if args.model == "tiny" else args.model
    quantiser = dict(backend=args.fp8_backend, grad_dtype=args.fp8_grads, power_of_two=args.pow2_scales)
    quantiser |= dict(keep_bf16=args.keep_bf16)
    device = "cpu" if sharded else args.device  # whole in CPU memory only, its parts go to the device
    loaded = precision.load_model(path, args.precision, device, torch.float32, **quantiser, runs_on=args.device)
    model, tokenizer, report = loaded
    check_head(model)
    if args.rollout_kernels == "exact":
        exact.apply(model)
    print(f"{path}: {sum(p.numel() for p in model.parameters()):,} parameters; {report}")
    rows, eval_rows = load_data(args, model, tokenizer)
    wide = torch.float32 if args.activations == "fp32" else None
    dtype = precision.recipe_of(args.precision)["dtype"]
    engine = start_engine(args, model, tokenizer, dict(quantiser, dtype=wide))
    shard = partial(parallel.shard, device=args.device, offload=args.cpu_offload) if sharded else None
    reference = precision.frozen(model, dtype, wide, shard) if args.kl_coef else None  # --model's weights, after a resume too
    masters = precision.Masters(model, dtype, held_in=wide, shard=shard)
    if args.activation_checkpointing:
        parallel.checkpoint_layers(model)
    fused = torch.device(args.device).type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(masters.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=fused)
    return SimpleNamespace(
        model=model, tokenizer=tokenizer, masters=masters, optimizer=optimizer, engine=engine, reference=reference,
        shuffled=data.Shuffled(rows, args.seed), function=function,
        eval_rows=eval_rows, done=0, summary={"tokens": 0, "train_seconds": 0.0}, calib=make_calibration(args),
        acrl=acrl.ACRL(args.acrl_gamma, args.acrl_baseline, distance=args.acrl_distance) if args.correction == "acrl" else None,
    )  # fmt: skip


def start_engine(args, model, tokenizer, options):
    """The sampling engine, before the learner is sharded: `sync` fills it."""
    kind, recipe = ("hf", args.precision) if args.load_rollouts else (args.engine, args.rollout_precision)  # recorded: no copy
    if kind == "vllm":
        options |= dict(memory_fraction=args.vllm_memory, sleep_level=args.vllm_sleep, tensor_parallel=args.vllm_tp)
        options |= dict(compile=args.vllm_compile, max_model_len=args.max_prompt_tokens + args.max_tokens)
    else:
        options |= dict(own_copy=parallel.world() > 1)
    return make_engine(kind, model, tokenizer, recipe, args.rollout_rows, args.rollout_kernels, device=args.device, **options)


def load_data(args, model, tokenizer):
    """(training rows, held-out rows), of prompts that leave room for an answer."""
    longest, context = args.max_prompt_tokens, getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context:
        longest = min(longest, context - args.max_tokens)
        if longest < 1:
            raise UserError(f"--max-tokens {args.max_tokens} leaves no room for a prompt: the model's context is {context}")
    formats = dict(system_prompt=args.system_prompt, template_args=args.template_args, prompt_format=args.prompt_format)
    formats |= dict(prompt_column=args.prompt_column, answer_column=args.answer_column)
    rows, eval_rows = data.load(args.data, tokenizer, longest, seed=args.seed, **formats), []
    if args.eval_every:
        eval_rows = data.load(args.eval_data, tokenizer, longest, **formats)[: args.eval_problems]
        common = data.overlap(rows, eval_rows)
        print(f"{len(rows)} training prompts, {len(eval_rows)} held out, {common} in both")
    if len(rows) < args.prompts_per_step:
        print(f"{args.data} has {len(rows)} prompts, a step takes {args.prompts_per_step}: they repeat within a step")
    return rows, eval_rows


# -----------------------------------------------------------------------------
# saved and taken up again


def method_state(run, args):
    """The parts of the method that carry state from step to step: name -> object with state_dict."""
    return ({"calib": run.calib} if args.clip == "calibrated" else {}) | ({"acrl": run.acrl} if run.acrl else {})


def state_of(run, args, step):
    """All but the tensors, after `step` finished steps."""
    state = {"step": step, "data": run.shuffled.state_dict(), "summary": copy.deepcopy(run.summary), "flags": vars(args)}
    state["rng"] = parallel.gather([checkpoint.rng_state()])  # one per process
    return state | {name: part.state_dict() for name, part in method_state(run, args).items()}


def finite(run):
    """Whether all masters of all ranks are numbers."""
    local = (parallel.local(w) for w in run.masters.parameters())
    return parallel.total(sum(not bool(w.isfinite().all()) for w in local)) == 0


def save_bytes(run):
    """Bytes of a checkpoint's tensors: masters and two moments in FP32."""
    return 12 * sum(w.numel() for w in run.masters.parameters())


def save(run, args):
    """Write the checkpoint of run.state; every rank calls it. UserError on every rank if it fails, or if a weight is NaN or
    infinite: such a checkpoint would take a good one's place."""
    state = run.state
    if not finite(run):
        raise Everywhere(f"after step {state['step']} some weights are not finite: not saved; go on from the last checkpoint "
                         "with --resume and a lower --lr")
    with run.stop.timed("save"):
        weights = {name: kept(w) for name, w in run.masters.weights.items()}
        optimizer_state = run.optimizer.state_dict()
        optimizer_state["state"] = {i: {k: kept(v) for k, v in slot.items()} for i, slot in optimizer_state["state"].items()}
        best = run.summary.get("best_step") if args.keep_best else None
        content = (run.model, run.tokenizer, weights, optimizer_state, state, args.keep_last)
        parallel.on_main(lambda: checkpoint.save(args.out, state["step"], *content, best=best))
    run.saved = state["step"]


def kept(tensor):
    """A gathered tensor on the CPU, of which ranks other than 0 keep nothing."""
    whole = parallel.full(tensor)
    return whole.cpu() if parallel.is_main() else whole.new_empty(0)


def restore(run, path, args):
    """Masters, optimizer state, data position, generators and counters from a checkpoint."""
    weights, optimizer_state, state = checkpoint.load(path)
    if state["step"] >= args.steps:
        raise UserError(f"--resume: {path} has {state['step']} steps done, --steps {args.steps} is the total; raise it")
    if ("dynamic_sampling" in state["flags"]) != ("dynamic_sampling" in vars(args)):
        script = "train_dapo.py" if "dynamic_sampling" in state["flags"] else "train_grpo.py"
        raise UserError(f"--resume: {path} was written by {script}; resume it with that script")
    run.masters.load(weights)
    slots = {}
    for i, w in enumerate(run.masters.parameters()):
        slot = optimizer_state["state"].get(i, {})
        slots[i] = {k: parallel.place(v, w).clone() if v.shape == w.shape else v.clone() for k, v in slot.items()}
    groups = run.optimizer.state_dict()["param_groups"]
    run.optimizer.load_state_dict({"state": {i: s for i, s in slots.items() if s}, "param_groups": groups})
    run.shuffled.load_state_dict(state["data"])
    run.done, run.summary = state["step"], state["summary"]
    restore_method(run, state, args)
    if len(state["rng"]) == parallel.world():
        checkpoint.set_rng_state(state["rng"][parallel.rank()])
    else:
        print(f"--resume: saved by {len(state['rng'])} processes, resumed on {parallel.world()}: libraries' own random "
              "generators start anew")
    if not args.eval_every:  # accuracies of earlier steps would pass for this run's result
        run.summary = {k: v for k, v in run.summary.items() if not k.startswith(("acc_", "se_", "len_", "best_"))}
    print(f"resumed {path}: {run.done} of {args.steps} steps done")
    for name, old in state["flags"].items():
        new = vars(args).get(name)
        if new != old and name != "resume":
            print(f"changed since the checkpoint: --{name.replace('_', '-')} {old} -> {new}")


def restore_method(run, state, args):
    """The calibration's and the controller's state; one saved under other flags is dropped with a line, and starts anew."""
    for name, part in method_state(run, args).items():
        if name not in state:
            print(f"--resume: the checkpoint has no state of {name}, which starts anew")
            continue
        try:
            part.load_state_dict(state[name])
        except ValueError as error:
            print(f"--resume: {error}; {name} starts anew")
    if args.clip == "calibrated":
        print(f"calibrated bounds: {run.calib.low:g} and {run.calib.high:g}")
