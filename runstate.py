"""What a run carries from step to step, and how it is saved and taken up again: exactly, on any number of processes.

    state = state_of(run, args, step)         counters, data position, every random generator, the method's state: plain JSON
    save(run, args, state)                    a checkpoint folder (checkpoint.py): state, FP32 masters, AdamW's moments
    restore(run, path, args)                  all of it back; flags come from the command line, and what changed is printed

`state_of` is taken at a step's end. A run that is stopped while it samples the next step saves that state: the weights have not
moved since, the prompts drawn meanwhile are drawn again.

Sharded tensors are gathered one by one and kept by rank 0 alone, which writes; on the way back every rank reads the files
through memory maps and keeps its part. So a checkpoint does not know how many processes wrote it.
"""

import copy
import time

import checkpoint
import parallel
from errors import UserError


def method_state(run, args):
    """The parts of the method that carry state from step to step: name -> object with state_dict."""
    return ({"calib": run.calib} if args.clip == "calibrated" else {}) | ({"acrl": run.acrl} if run.acrl else {})


def state_of(run, args, step):
    """All but the tensors, after `step` finished steps."""
    state = {"step": step, "data": run.shuffled.state_dict(), "summary": copy.deepcopy(run.summary), "flags": vars(args)}
    state["rng"] = parallel.gather([checkpoint.rng_state()])  # one per process
    return state | {name: part.state_dict() for name, part in method_state(run, args).items()}


def save(run, args, state):
    """Write the checkpoint of a state; every rank calls it. Returns its folder; raises UserError on every rank if it failed."""
    start = time.monotonic()
    weights = {name: kept(w) for name, w in run.masters.weights.items()}
    optimizer_state = run.optimizer.state_dict()
    optimizer_state["state"] = {i: {k: kept(v) for k, v in slot.items()} for i, slot in optimizer_state["state"].items()}
    best = run.summary.get("best_step") if args.keep_best else None
    content = (run.model, run.tokenizer, weights, optimizer_state, state, args.keep_last)
    path = parallel.on_main(lambda: checkpoint.save(args.out, state["step"], *content, best=best))
    run.stop.saving = max(run.stop.saving, time.monotonic() - start)
    return path


def kept(tensor):
    """A gathered tensor on the CPU, of which ranks other than 0 keep nothing."""
    whole = parallel.full(tensor)
    return whole.cpu() if parallel.is_main() else whole.new_empty(0)


def restore(run, path, args):
    """Masters, optimizer state, data position, generators and counters from a checkpoint."""
    weights, optimizer_state, state = checkpoint.load(path)
    if state["step"] >= args.steps:
        raise UserError(f"--resume: {path} has {state['step']} steps done, --steps {args.steps} is the total; raise it")
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
        run.summary = {k: v for k, v in run.summary.items() if not k.startswith(("acc_", "se_", "len_"))}
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
