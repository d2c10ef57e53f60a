"""Several processes: started by accelerate, one model sharded over them by FSDP2. With one, every function is the identity.

    accelerate launch --num_processes 8 train_grpo.py ...             one node; two: --num_machines 2 --machine_rank 0|1
    accelerate launch --multi_gpu --num_processes 2 train_grpo.py ... --device cpu        the same code on gloo

(Without GPUs accelerate starts one process, whatever --num_processes says, unless --multi_gpu makes it call torchrun.)

Who does what in a step

    prompts       all ranks draw the same ones; rank r samples and grades its block of them          `block`
    answers       gathered: every rank holds the step's whole batch, and its advantages and metrics    `gather`
    mini-batch    the same answers as with one process; sorted by length and dealt out like cards      learner.split
    loss          each rank's tokens over the count of all ranks' tokens                               learner.loss_denom
    gradients     summed by FSDP2's reduce-scatter, in FP32; clipped by the norm over all ranks         `shard`
    AdamW         each rank its shard of FP32 masters and moments                                       precision.Masters
    weights       gathered one by one: to the sampling engines, to rank 0's checkpoint                 `full`
    files, lines  rank 0's

So a run's batches do not depend on the number of processes, a checkpoint is one plain folder whatever wrote it, and a run may
be resumed on another number of processes. What is gathered are token ids and log-probs as Python objects: small beside a step.

FSDP2 (`fully_shard`): every decoder layer is a unit, embeddings, final norm and lm_head are the root's. The published weights
(BF16) are sharded and gathered layer by layer, forward and backward; masters, moments and gradients are never whole. All
ranks must run the same number of forwards: ranks with fewer micro-batches run blank ones (learner.split).
"""

import os
from datetime import timedelta
from functools import partial
from types import MethodType

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

import logprob
from errors import Everywhere, Interrupted, UserError

working = False  # inside a rank's own part of some work (`meet`): no other rank waits for it in the middle of an operation


def launched():
    """Processes that the launcher says there are, before any of them has met another."""
    size = os.environ.get("WORLD_SIZE") or "1"
    if not size.isdigit() or size == "0":
        raise UserError(f"the environment's WORLD_SIZE is {size!r}, not a number of processes; unset it for one process")
    return int(size)


def start(device):
    """Meet the other processes; returns this one's device. `device`: --device, cpu or cuda. Call it before vLLM is imported,
    which would start a group of its own."""
    if launched() == 1:
        return device
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(f"WORLD_SIZE is {launched()}, but {', '.join(missing)} not set: start several processes with "
                        "`accelerate launch --num_processes N ...`, or unset WORLD_SIZE for one")
    cpu = device == "cpu"
    if not dist.is_initialized():
        # objects and float64 sums go through gloo; an hour: rank 0 may be writing a checkpoint of hundreds of GB
        dist.init_process_group("gloo" if cpu else "cuda:nccl,cpu:gloo", timeout=timedelta(hours=1))
    state = PartialState(cpu=cpu)
    return "cpu" if cpu else str(state.device)


def world():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_main():
    return rank() == 0


def stop():
    """Leave the group, so that no rank waits for one that has gone."""
    if launched() > 1 and dist.is_initialized():
        dist.destroy_process_group()


# -----------------------------------------------------------------------------
# work and results


def block(n, together=1):
    """(start, end) of this rank's share of n items; `together` ranks in a row (--vllm-tp) have the same share."""
    groups, group = world() // together, rank() // together
    return n * group // groups, n * (group + 1) // groups


def gather(items, together=1):
    """Lists of picklable items -> all ranks' items in the order of ranks, on every rank; of `together` ranks in a row, whose
    lists are the same, the first's."""
    if world() == 1:
        return items
    return gather_object(items if rank() % together == 0 else [])


def total(number):
    """The sum of a number over all ranks, in the order of ranks."""
    return sum(gather([number]))


def largest(number):
    return max(gather([number]))


def from_main(value):
    """Rank 0's value: what depends on a clock or on a disk must be decided once."""
    return gather([value])[0]


def meet(work, together=1):
    """Lists that the ranks make by `work()`, each its own, without a word to another, joined as by `gather`. If it ends in a
    UserError or is interrupted by a signal (stopping.py) on one rank, all of them raise that, and nobody waits for ever."""
    global working
    if world() == 1:
        return work()
    result, problem = [], None
    try:
        working = together == 1  # ranks that share an engine talk to each other all the time
        result = work()
    except (UserError, Interrupted) as error:
        problem = error if isinstance(error, Interrupted) else Everywhere(f"rank {rank()}: {error}")
    finally:
        working = False
    parts = gather([(result if rank() % together == 0 else [], problem)])
    for _, problem in parts:
        if problem is not None:
            raise problem
    return [item for part, _ in parts for item in part]


def on_main(function, *arguments):
    """The result of a function that rank 0 alone calls, on every rank; a UserError of it is raised on all of them."""
    result = problem = None
    if is_main():
        try:
            result = function(*arguments)
        except UserError as error:
            problem = str(error)
    result, problem = from_main((result, problem))
    if problem:
        raise Everywhere(problem)
    return result


def joined(values):
    """The ranks' concatenation of a 1-D tensor of any length, on its own device."""
    return values if world() == 1 else torch.cat(gather([values.detach().cpu()])).to(values.device)


def agree(what, value):
    """Raise UserError unless all ranks hold the same value (a fingerprint of weights after a sync)."""
    values = gather([value])
    odd = [r for r, other in enumerate(values) if other != values[0]]
    if odd:
        raise UserError(f"rank {odd[0]}'s {what} differs from rank 0's: the ranks hold different models; go on with --resume")


# -----------------------------------------------------------------------------
# sharding


def decoder_layers(model):
    """The model's decoder layers: the outermost ModuleList of its body (experts may be another, inside)."""
    layers = next((m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList)), None)  # outermost first
    if layers is None:
        raise UserError("--model: no list of decoder layers in it, which sharding and checkpointing go by; use another model")
    return list(layers)


def shard(model, device, offload=False):
    """Shard a model's parameters over all ranks, in place: each becomes a DTensor on `device` (offload: in pinned CPU memory).

    Gradients are reduced in FP32 and summed, not averaged: the loss is divided by the global count already. Scoring calls the
    body and the head itself (logprob.score): it becomes a method that FSDP2 knows as a forward, with the root's weights whole.
    """
    model.score = MethodType(logprob.score, model)
    mesh = torch.distributed.device_mesh.init_device_mesh(torch.device(device).type, (world(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    options = dict(mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            module.set_gradient_divide_factor(1.0)
    register_fsdp_forward_method(model, "score")


def place(tensor, like):
    """This rank's part of a full tensor that every rank has, laid out as the DTensor `like`; the tensor itself otherwise."""
    if not hasattr(like, "device_mesh"):
        return tensor.to(like.device)
    part = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None).to_local()
    out = torch.empty_like(like, dtype=tensor.dtype)  # with --cpu-offload on the CPU, whatever the mesh's device
    out.to_local().copy_(part)
    return out


def full(tensor):
    """A DTensor gathered (every rank calls it), any other tensor as it is; detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    """This rank's part of a DTensor; any other tensor as it is; detached."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def checkpoint_layers(model):
    """--activation-checkpointing: keep each decoder layer's input only, and run the layer again in backward."""
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
