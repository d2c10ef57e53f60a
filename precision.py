"""Precision recipes: the table, and `convert`, which turns a model's linear layers into low-precision ones in place.

    recipe       linear layers                          everything else
    fp32         FP32                                   FP32
    bf16         BF16                                   BF16
    fp8-tensor   FP8, one scale per operand             BF16
    fp8-row      FP8, per token and per channel         BF16
    fp8-block    FP8, 1x128 and 128x128 blocks          BF16

Everything else: embeddings, lm_head, norms, attention, router, biases; log-softmax is always FP32 (logprob.py). `--activations
fp32` computes it in FP32, on weights rounded to BF16 all the same: sampler and learner then agree far better (align.py).

Master weights. Training keeps FP32 masters (`Masters`), rounds them to BF16 once per optimiser step, and that BF16 tensor is
what the learner's forward uses, what FP8Linear quantises and what the sampler is given. A weight of 0.02 does not move by 1e-6
in BF16 (its step there is 1.2e-4); in FP32 it does.

    report = convert(model, "fp8-row", keep_bf16="first:1,last:1")     # report["converted"], report["skipped"]: name -> why
    weights_changed(model)             # after every optimiser step, load and resume (and after fully_shard)
    with high_precision(model): ...    # the same module and weights without quantisation: shadow passes, evaluation, saving

Layers are skipped by name only (lm_head, embeddings, router), never for being small; K or N not a multiple of 16 is refused.
"""

import copy
import os
import re
import sys
from contextlib import contextmanager
from functools import partial

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import fp8
import parallel
from errors import UserError, check_device

RECIPES = {
    "fp32": {"dtype": torch.float32, "granularity": None},
    "bf16": {"dtype": torch.bfloat16, "granularity": None},
    "fp8-tensor": {"dtype": torch.bfloat16, "granularity": "tensor"},
    "fp8-row": {"dtype": torch.bfloat16, "granularity": "row"},
    "fp8-block": {"dtype": torch.bfloat16, "granularity": "block"},
}
GRAD_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SKIPPED_NAMES = ("lm_head", "embed_out", "router", "gate", "shared_expert_gate")  # `gate` is a MoE router, `gate_proj` is not


class Report(dict):
    """What `convert` did: report.converted (list of names) and report.skipped (name -> reason); also by key."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)

    def __str__(self):
        if not self.converted:
            return f"linear layers in {self.recipe}"
        skipped = ", ".join(f"{name} ({why})" for name, why in self.skipped.items()) or "none"
        return f"{len(self.converted)} linear layers in {self.recipe}; left in high precision: {skipped}"


def recipe_of(recipe):
    """The table's row; UserError on an unknown name."""
    if recipe not in RECIPES:
        raise UserError(f"unknown precision recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[recipe]


def default_backend(device):
    """`scaled_mm` on CUDA, `emulate` elsewhere. A GPU without FP8 units is refused later, not emulated silently."""
    return "scaled_mm" if torch.device(device).type == "cuda" else "emulate"


def convert(module, recipe, backend=None, grad_dtype="e4m3", power_of_two=False, fp32_products=False, keep_bf16="",
            runs_on=None):
    """Convert every nn.Linear of `module` (itself included) in place; parameters and state_dict keys stay the same.

    recipe         a name of RECIPES; `fp32` and `bf16` convert nothing (the caller chooses the module's dtype)
    backend        emulate | scaled_mm, default by the device the weights are on now: move the model first, or say `runs_on`
    grad_dtype     e4m3 | e5m2; power_of_two rounds scales up
    fp32_products  emulate multiplies codes in FP32 instead of BF16
    keep_bf16      layers left out by position, e.g. "first:1,last:2" (decoder layers counted by the number in their name)
    returns        Report(recipe, converted, skipped). Raises UserError (a ValueError) naming the layer or flag.
    """
    granularity = recipe_of(recipe)["granularity"]
    report = Report(recipe=recipe, converted=[], skipped={})
    linears = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    kept = kept_by_position([name for name, _ in linears], keep_bf16)
    if grad_dtype not in GRAD_DTYPES:
        raise UserError(f"gradient format {grad_dtype!r} is not one of {', '.join(GRAD_DTYPES)}")
    if backend is not None and backend not in fp8.BACKENDS:
        raise UserError(f"--fp8-backend {backend!r} is not one of {', '.join(fp8.BACKENDS)}")
    for name, layer in linears:  # decide first, convert afterwards: a refusal leaves the module as it was
        if hasattr(layer.weight, "device_mesh"):
            raise UserError(f"layer {name!r} is sharded already: call precision.convert before fully_shard")
        part = next((p for p in name.split(".") if p in SKIPPED_NAMES or p.startswith("embed")), None)
        if granularity is None:
            report.skipped[name] = f"recipe {recipe}"
        elif part:
            report.skipped[name] = f"named {part}"
        elif name in kept:
            report.skipped[name] = f"--keep-bf16 {keep_bf16}"
        elif type(layer) not in (nn.Linear, fp8.FP8Linear):
            report.skipped[name] = f"a {type(layer).__name__}, not a plain nn.Linear"
        else:
            try:
                where = runs_on or layer.weight.device
                fp8.FP8Linear.check(layer, granularity, backend or default_backend(where), where)
            except ValueError as error:
                raise UserError(f"layer {name or type(module).__name__!r}: {error}") from error
            report.converted.append(name)
    if keep_bf16 and granularity and not report.converted:
        raise UserError(f"--keep-bf16 {keep_bf16} leaves no layer to convert; use --precision bf16 if that is meant")
    for name, layer in linears:
        if type(layer) is fp8.FP8Linear:
            layer.__class__ = nn.Linear  # undo an earlier conversion
        if name in report.converted:
            where = runs_on or layer.weight.device
            settings = (backend or default_backend(where), GRAD_DTYPES[grad_dtype], power_of_two, fp32_products, where)
            fp8.FP8Linear.of(layer, granularity, *settings)
    module.precision_recipe = recipe
    return report


def load_model(path, recipe, device="cpu", dtype=None, **convert_kwargs):
    """(model, tokenizer, report): a causal language model from a folder or hub name, in eval mode (dropout off), converted, its
    weights in `dtype`, by default the recipe's (training loads FP32 and lets `Masters` round). Raises UserError when the folder
    is missing, has no tokenizer, or does not fit the recipe."""
    check_device(device)
    dtype = dtype or recipe_of(recipe)["dtype"]
    first, _, rest = path.partition("/")
    hub_name = rest and "/" not in rest and not os.path.exists(first)  # out/typo is a folder that is not there
    if not os.path.isdir(path) and not hub_name:
        raise UserError(f"--model {path}: no such folder; give a transformers folder, a hub name OWNER/NAME, or `tiny`")
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "config.json")):
        raise UserError(f"--model {path}: the folder has no config.json; give a folder saved by transformers' save_pretrained")
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
    if os.path.isdir(path) and not any(os.path.exists(os.path.join(path, name)) for name in names):
        raise UserError(f"--model {path}: the folder has no tokenizer; save the model's tokenizer into it")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # transformers draws one for every load
    for what, loader, kwargs in (
        ("tokenizer", AutoTokenizer, {}),
        ("model", AutoModelForCausalLM, {"dtype": dtype, "attn_implementation": "sdpa"}),
    ):
        try:
            loaded = loader.from_pretrained(path, **kwargs)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"--model {path}: its {what} does not load: {reason}") from error
        if what == "tokenizer":
            tokenizer = loaded
    model = loaded.to(device).eval()
    return model, tokenizer, convert(model, recipe, **convert_kwargs)


def kept_by_position(names, keep_bf16):
    """Names of the linear layers inside the first or last decoder layers that `keep_bf16` ("first:1,last:1") leaves out."""
    if not keep_bf16:
        return set()
    number = {name: int(m[1]) for name in names if (m := re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)", name))}
    count = 1 + max(number.values(), default=-1)
    kept = set()
    for part in keep_bf16.split(","):
        match = re.fullmatch(r"(first|last):(\d+)", part.strip())
        if not match:
            raise UserError(f"--keep-bf16 {keep_bf16!r}: {part!r} is not first:N or last:N, e.g. first:1,last:1")
        if count == 0:
            raise UserError(f"--keep-bf16 {keep_bf16!r}: the model has no numbered decoder layers to count")
        n = int(match[2])
        kept |= {name for name, i in number.items() if (i < n if match[1] == "first" else i >= count - n)}
    return kept


def converted_layers(module):
    """The FP8Linear layers of a module."""
    return [layer for layer in module.modules() if isinstance(layer, fp8.FP8Linear)]


def weights_changed(module):
    """Drop cached quantised weights. Call after each optimiser step, load, resume and fully_shard: no counter tells us."""
    for layer in converted_layers(module):
        layer.drop_cache()


@contextmanager
def high_precision(module, dtype=None):
    """Run the same module, with the same weights, without quantisation; nests, and restores on exceptions. A backward with
    activation checkpointing runs the forward again: keep it inside as well. dtype: of weights (their values stay) and
    activations meanwhile, by default what they are; another takes a copy of the weights."""
    before = [(layer, layer.quantized) for layer in converted_layers(module)]
    held = [(p, p.data) for p in module.parameters() if dtype is not None and p.dtype != dtype]
    for layer, _ in before:
        layer.quantized = False
    try:
        for p, data in held:
            p.data = data.to(dtype)
        yield module
    finally:
        for p, data in held:
            p.data = data
        for layer, quantized in before:
            layer.quantized = quantized


class Masters:
    """FP32 master weights: gradients are summed in FP32, the optimiser moves the masters, and `publish` rounds them into the
    model once per step. In FP32 (recipe fp32) the masters are the parameters themselves.

        masters = Masters(model, torch.bfloat16)      # an FP32 model: its weights become the masters, rounded in the model
        optimizer = torch.optim.AdamW(masters.parameters())
        loss.backward()  (any number of times; each call's BF16 gradients are added to the FP32 ones at once)
        optimizer.step(); masters.publish(); masters.zero_grad()

    dtype: what the weights are rounded to; held_in: what the model's parameters are kept in, by default the same. held_in FP32
    keeps BF16 values in FP32 parameters, so that activations are FP32 (--activations fp32). shard: a function that shards the
    rounded model in place (parallel.shard, FSDP2); masters are then laid out as its parameters are.
    """

    def __init__(self, model, dtype=None, held_in=None, shard=None):
        self.model, self.hooks, self.dtype = model, [], dtype
        start = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}  # tied weights appear once
        own = [name for name, w in start.items() if (dtype or w.dtype) != torch.float32]
        round_weights(model, dtype, held_in)
        if shard:
            shard(model)
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = dict(self.params)
        for name in own:
            self.weights[name] = nn.Parameter(parallel.place(start.pop(name).float().clone(), self.params[name]))
            hook = partial(accumulate_grad, self.weights[name])
            self.hooks.append(self.params[name].register_post_accumulate_grad_hook(hook))
        weights_changed(model)

    def parameters(self):
        return list(self.weights.values())

    def release(self):
        """Make the model's parameters FP32 again, equal to the masters, and let gradients go to them."""
        for hook in self.hooks:
            hook.remove()
        for name, p in self.params.items():
            p.data = self.weights[name].detach().clone()
        weights_changed(self.model)

    def zero_grad(self):
        for w in self.weights.values():
            if w.grad is not None:
                w.grad.zero_()

    @torch.no_grad()
    def publish(self):
        """Round the masters into the model's parameters and drop the quantised copies."""
        for name, p in self.params.items():
            if self.weights[name] is not p:
                p.copy_(self.weights[name].to(self.dtype or p.dtype))
        if hasattr(self.model, "reshard"):
            self.model.reshard()  # FSDP2 leaves the root's parameters whole, and old, after a forward without a backward
        weights_changed(self.model)

    @torch.no_grad()
    def load(self, weights):
        """Load named FP32 weights (a checkpoint's) into the masters and the model. Raises UserError, before anything is
        changed, unless names and shapes are exactly the model's."""
        odd = sorted(self.weights.keys() ^ weights.keys())
        odd = odd or [name for name, w in self.weights.items() if w.shape != weights[name].shape]
        if odd:
            count = f"{len(odd)} names or shapes differ, first {odd[0]!r}"
            raise UserError(f"the checkpoint's weights are not those of --model: {count}; resume with the --model of that run")
        for name, w in self.weights.items():
            w.copy_(parallel.place(weights[name], w))
        self.publish()


def round_weights(model, dtype, held_in=None):
    """Round the parameters to `dtype` (None: leave them) and keep them in `held_in`, by default the same."""
    for p in model.parameters():
        if (dtype or p.dtype) != torch.float32:
            p.data = p.data.to(dtype or p.dtype).to(held_in or dtype or p.dtype)


def frozen(model, dtype, held_in=None, shard=None):
    """A copy of a model as `Masters` publishes it, without gradients: the reference of a KL term."""
    model = copy.deepcopy(model).requires_grad_(False)
    round_weights(model, dtype, held_in)
    if shard:
        shard(model)
    weights_changed(model)
    return model


def accumulate_grad(master, p):
    """Add a BF16 gradient to the FP32 one and free it."""
    master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
    p.grad = None
