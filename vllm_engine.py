"""The vLLM engine: real vLLM, on CPU or GPU, sampling with the learner's own quantiser, and weights that arrive every step.

One quantiser on both sides. vLLM's own FP8 kernels scale and round differently from the learner's FP8Linear. Here the linear
layers of vLLM's model run `fp8.make_operand` and `fp8.gemm`, the functions of the learner, through vLLM's public
`register_quantization_config`: no patching. vLLM fuses q, k, v into one matrix and gate, up into another; tensor and block
scales are taken per logical shard, so that they are those of the learner's separate layers (row scales do not care).

Weights. The engine starts from a temporary folder with config, tokenizer and dummy weights; `sync` streams the learner's BF16
tensors through vLLM's public reload (`collective_rpc("reload_weights")`), which hands them to the model's own loader layer by
layer and lets the quantisation method quantise anew: once per sync, not once per call, into the memory of the last codes. The
BF16 weights stay beside them (`--vllm-memory` has to hold both). Then the prefix cache, full of old weights' KV, is reset,
names are compared, and a fingerprint (sum and absolute sum of every parameter, fused ones compared with the sum of their parts)
is checked against the learner's: an unknown, missing or stale weight is an error, not a slow drift. Tied embeddings are untied
on vLLM's side: its reload leaves a tied lm_head with old weights.

Sampling. Token ids in, token ids out; each answer is its own request with its own seed; the sampled token's processed log-prob
is found by its id. The engine's global side effects are contained: RNG states are put back after the start and each call.
"""

import contextlib
import gc
import os
import random
import tempfile

import numpy
import torch

import fp8
import parallel
import precision
from errors import UserError
from rollout import Completion, check_prompts, eos_ids, row_seed
from runlog import write_json

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: weights are handed over, not copied
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the learner uses these threads too, other runs other cores
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams  # noqa: E402  after the settings above, which vLLM reads at import
from vllm.distributed import get_tp_group  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase  # noqa: E402
from vllm.model_executor.layers.quantization import register_quantization_config  # noqa: E402
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig  # noqa: E402
from vllm.model_executor.parameter import ModelWeightParameter  # noqa: E402
from vllm.model_executor.utils import set_weight_attrs  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: E402


@register_quantization_config("aligned")
class AlignedConfig(QuantizationConfig):
    """vLLM's side of a recipe: `granularity` None for high precision, the layers that `convert` skips left out."""

    def __init__(self, granularity=None, backend="emulate", power_of_two=False, fp32_products=False, kept=()):
        super().__init__()
        self.granularity, self.backend, self.power_of_two = granularity, backend, power_of_two
        self.fp32_products, self.kept = fp32_products, set(kept)

    def get_name(self):
        return "aligned"

    def get_supported_act_dtypes(self):
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls):
        return 80

    @staticmethod
    def get_config_filenames():
        return []

    @classmethod
    def from_config(cls, config):
        return cls(**{k: config[k] for k in ("granularity", "backend", "power_of_two", "fp32_products", "kept")})

    def get_quant_method(self, layer, prefix):
        if not isinstance(layer, LinearBase):
            return None  # embeddings, lm_head, attention
        parts = prefix.split(".")
        skip = any(p in precision.SKIPPED_NAMES or p.startswith("embed") for p in parts)
        skip = skip or any(p.isdigit() and int(p) in self.kept for p in parts)
        return AlignedLinear(None if skip else self.granularity, self.backend, self.power_of_two, self.fp32_products)


class AlignedLinear(LinearMethodBase):
    """A linear layer of vLLM's model computed as the learner computes it; granularity None: F.linear.

    Tensor parallel: a shard's scales are the maximum over the shards, so that the codes are those of the whole matrix; blocks
    must not straddle shards. The partial sums of a row-parallel layer are rounded before vLLM adds them."""

    def __init__(self, granularity, backend, power_of_two, fp32_products):
        self.granularity, self.backend, self.power_of_two = granularity, backend, power_of_two
        self.fp32_products = fp32_products

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        weight_loader,
        **attributes,
    ):
        layer.shard_sizes = list(output_partition_sizes)  # q, k, v or gate, up: the learner's separate layers
        layer.splits_input, layer.splits_output = input_size_per_partition != input_size, False
        if sum(output_partition_sizes) != output_size:
            layer.splits_output = True
        sizes = [*output_partition_sizes * layer.splits_output, *[input_size_per_partition] * layer.splits_input]
        if self.granularity == "block" and any(n % fp8.BLOCK for n in sizes):
            raise UserError(f"--vllm-tp cuts a matrix into shards of {sizes}: not whole fp8-block blocks; use a smaller one")
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=weight_loader)
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, attributes)

    def process_weights_after_loading(self, layer):
        if self.granularity is None:
            return
        products = self.products(layer.weight)
        # a tensor scale spans all shards of the matrix, a row scale those of the row
        shared = self.granularity == "tensor" or (self.granularity == "row" and layer.splits_input)
        operands = [
            self.operand(shard.to(torch.bfloat16), (fp8.BLOCK, fp8.BLOCK), products, shared)
            for shard in layer.weight.data.split(layer.shard_sizes)
        ]
        if self.backend == "emulate":  # one GEMM for all shards: scales spread over the rows they belong to
            scales = [fp8.expand_scale(o.scale, (len(o.codes), o.scale.shape[1])).expand(len(o.codes), -1) for o in operands]
            operands = [fp8.Operand(torch.cat([o.codes for o in operands]), torch.cat(scales))]
        if hasattr(layer, "operands"):  # in place: CUDA graphs captured at the start go on reading the same memory
            for old, new in zip(layer.operands, operands, strict=True):
                old.codes.copy_(new.codes)
                old.scale.copy_(new.scale)
        else:
            layer.operands = operands

    def apply(self, layer, x, bias=None):
        if self.granularity is None:
            return torch.nn.functional.linear(x, layer.weight, bias)
        shared = layer.splits_input and self.granularity != "block"
        a = self.operand(x.reshape(-1, x.shape[-1]), (1, fp8.BLOCK), self.products(x), shared)
        y = torch.cat([fp8.gemm(a, b, self.granularity, self.backend, x.dtype) for b in layer.operands], -1)
        y = y.reshape(*x.shape[:-1], -1)
        return y if bias is None else y + bias.to(y.dtype)

    def products(self, x):
        """The dtype in which `emulate` multiplies codes, as FP8Linear.products."""
        return torch.float32 if self.fp32_products or x.dtype == torch.float32 else torch.bfloat16

    def operand(self, x, block, products, shared):
        """fp8.make_operand; shared: the scale is the maximum over the tensor-parallel ranks (a scale grows with its amax)."""
        scale = None
        if shared and get_tp_group().world_size > 1:
            scale = fp8.compute_scale(x, self.granularity, -1, torch.float8_e4m3fn, block, self.power_of_two)
            torch.distributed.all_reduce(scale, torch.distributed.ReduceOp.MAX, group=get_tp_group().device_group)
        dtype = torch.float8_e4m3fn
        return fp8.make_operand(x, self.granularity, dtype, self.backend, block, self.power_of_two, products, scale)


@contextlib.contextmanager
def rng_untouched():
    """vLLM seeds the global generators at its start and draws from them in generate: put their states back."""
    state, others = torch.get_rng_state(), (random.getstate(), numpy.random.get_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(others[0])
        numpy.random.set_state(others[1])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def parameter_names(model):
    return [name for name, _ in model.named_parameters()]


def sums(named):
    """name -> (sum, absolute sum) in float64."""
    wide = {"dtype": torch.float64}
    return {name: (x.sum(**wide).item(), x.abs().sum(**wide).item()) for name, x in named}


def parameter_sums(model):
    """`sums` of every parameter that is not FP8 codes, of all tensor-parallel shards; runs inside vLLM's worker."""
    vocabulary = {f"{name}.weight": m.shard_indices for name, m in model.named_modules() if hasattr(m, "shard_indices")}
    rows = {name: shard.num_org_elements for name, shard in vocabulary.items()}  # without the padding of sharded vocabularies
    named = ((name, p[: rows.get(name, len(p))]) for name, p in model.named_parameters() if p.element_size() > 1)
    held, group = sums(named), get_tp_group()
    if group.world_size > 1:
        total = torch.tensor(list(held.values()), dtype=torch.float64)
        torch.distributed.all_reduce(total, group=group.cpu_group)
        held = {name: tuple(pair) for name, pair in zip(held, total.tolist(), strict=True)}
    return held


def buffer_sums(model):
    """`sums` of every buffer (RoPE's table): a deep sleep must bring them back."""
    return sums(model.named_buffers())


def use_rounded_norms(vllm_model):
    """RMSNorm as transformers computes it: the residual sum is rounded to BF16 first. Runs inside vLLM's worker."""
    for module in vllm_model.modules():
        if type(module).__name__ == "RMSNorm":
            module.forward = lambda x, residual=None, norm=module: rounded_norm(norm, x, residual)


def rounded_norm(norm, x, residual):
    total = x if residual is None else x + residual
    h = total.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    out = norm.weight * h.to(total.dtype)
    return out if residual is None else (out, total)


def packed_modules(model):
    """vLLM's fused modules: fused name -> the names of its parts."""
    return dict(getattr(model, "packed_modules_mapping", {}))


class VLLMEngine:
    """Same interface as rollout.HFEngine; see the module docstring."""

    def __init__(
        self,
        model,
        tokenizer,
        recipe,
        max_rows=256,
        kernels="aligned",
        memory_fraction=0.4,
        tensor_parallel=1,
        sleep_level=2,
        max_model_len=None,
        dtype=None,
        own_rope=False,
        own_norm=False,
        compile=False,
        device=None,
        **quantiser,
    ):
        """model: the learner's module, for its config and layer names; recipe, kernels: what the linear layers run

        memory_fraction, sleep_level: of the GPU; tensor_parallel > 1: one process per GPU of the group, started by a launcher
        dtype: of all but the linear layers' operands, by default the recipe's; quantiser: precision.convert's arguments
        compile: by Inductor: 1.8 times as fast on a CPU after a start of a minute or more; fused kernels round elsewhere
        own_norm: vLLM's RMSNorm, which takes the residual sum before its rounding (always so on a GPU: CUDA graphs)
        own_rope: vLLM's RoPE kernel, which rounds once, not the learner's arithmetic: most of a small model's gap (align.py)
        """
        device = torch.device(device or model.device)
        gpu = device.type == "cuda"
        config = model.config.get_text_config()
        check_tensor_parallel(tensor_parallel, getattr(config, "num_key_value_heads", tensor_parallel))
        self.eos, self.vocab = eos_ids(model, tokenizer), len(tokenizer)
        # ids past the tokenizer (padded embeddings) have no text: they are never sampled
        self.no_text = dict.fromkeys(range(self.vocab, config.vocab_size), -100.0)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos[0]
        self.context = min(max_model_len or 2**31, getattr(config, "max_position_embeddings", 2**31))
        self.dtype = dtype or precision.recipe_of(recipe)["dtype"]
        self.memory_fraction, self.tensor_parallel = memory_fraction, tensor_parallel
        self.sleep_level, self.asleep = sleep_level if gpu else 0, False
        quantisation, extra = engine_quantisation(model, recipe, kernels, device, **quantiser)
        self.folder = tempfile.TemporaryDirectory(prefix="vllm-")
        hf_config = model.config.to_dict() | {"dtype": str(self.dtype).removeprefix("torch.")}
        # vLLM's reload leaves a tied lm_head with old weights (packed apart on a CPU): untie there, send the embedding twice
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        hf_config |= {"architectures": [type(model).__name__], "tie_word_embeddings": False} | extra
        write_json(os.path.join(self.folder.name, "config.json"), hf_config)
        tokenizer.save_pretrained(self.folder.name)
        gpu_only = {"enable_sleep_mode": sleep_level > 0, "gpu_memory_utilization": memory_fraction}
        # A prompt prefilled in pieces makes vLLM rewind the request's generator, which a CPU generator cannot do: no pieces
        cpu_only = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(self.context, 2048)}
        set_num_threads = torch.set_num_threads
        # the learner's arithmetic, operation by operation: no fusion, which keeps FP32 between them, and no RoPE kernel
        compilation = {"mode": 0} | ({} if own_rope else {"custom_ops": ["-rotary_embedding"]})
        compile = compile or kernels == "native"
        with rng_untouched(), failures_explained(memory_fraction):
            self.llm = LLM(
                model=self.folder.name, dtype=str(self.dtype).removeprefix("torch."), load_format="dummy",
                quantization=quantisation, max_model_len=self.context, max_num_seqs=max_rows,
                logprobs_mode="processed_logprobs", enable_prefix_caching=True, enforce_eager=not (gpu or compile),
                disable_log_stats=True, seed=0,
                tensor_parallel_size=tensor_parallel,
                **({} if compile else {"compilation_config": compilation}),
                # one engine per group of processes: vLLM takes ranks and GPUs from the launcher
                **({"distributed_executor_backend": "external_launcher"} if parallel.launched() > 1 else {}),
                **(gpu_only if gpu else cpu_only),
            )  # fmt: skip
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it for the whole process
        if not (own_norm or gpu or compile):  # captured graphs and compiled code would not notice
            self.llm.apply_model(use_rounded_norms)
        self.packed = self.llm.apply_model(packed_modules)[0]
        self.names = {name for name in self.llm.apply_model(parameter_names)[0] if "scale" not in name}
        self.buffers = self.llm.apply_model(buffer_sums)[0]

    def generate(self, prompt_ids, n=1, temperature=1.0, max_tokens=64, seed=0, progress=False, top_p=1.0, first=0):
        """As rollout.HFEngine.generate. A token whose log-prob vLLM did not return gets NaN, which the corrections count."""
        if self.asleep:
            raise UserError("vLLM sleeps since the last samples were taken: sync its weights before the next generate")
        check_prompts(prompt_ids, max_tokens, self.context)
        requests, params = [], []
        for i, ids in enumerate(prompt_ids):
            for j in range(n):
                requests.append({"prompt_token_ids": ids})
                params.append(SamplingParams(
                    temperature=temperature, top_p=top_p, top_k=0, max_tokens=max_tokens, seed=row_seed(seed, first + i, j),
                    logprobs=0, stop_token_ids=self.eos, ignore_eos=True, detokenize=False, repetition_penalty=1.0,
                    logit_bias=self.no_text or None,
                ))  # fmt: skip
        with rng_untouched(), failures_explained(self.memory_fraction):
            outputs = self.llm.generate(requests, params, use_tqdm=progress and os.isatty(2))
        return [self.completion(out.outputs[0]) for out in outputs]

    def completion(self, out):
        ids = list(out.token_ids)
        logps = [d[t].logprob if t in d else float("nan") for t, d in zip(ids, out.logprobs, strict=True)]
        return Completion(ids, logps, "stop" if out.finish_reason == "stop" else "length")

    @torch.no_grad()
    def sync(self, named_weights, check=True):
        """Stream the learner's weights in, layer by layer, and reset the prefix cache; a sleeping engine wakes on the way.

        named_weights: (name, tensor) pairs; each is rounded to the engine's dtype on the way, a sharded one (FSDP2) gathered.
        check: compare fingerprints, a pass over all weights on both sides; names are always compared. Returns the fingerprint
        (None without check). Raises UserError where the engine holds something else than was sent.
        """
        sent = {}

        def stream():
            for name, w in self.untied(named_weights):
                w = parallel.full(w).to(self.dtype)
                fused = fused_name(name, self.packed)
                total, absolute = sums([(name, w)])[name] if check else (0.0, 0.0)
                before = sent.get(fused, (0.0, 0.0))
                sent[fused] = (before[0] + total, before[1] + absolute)
                yield name, w

        with rng_untouched(), failures_explained(self.memory_fraction):
            self.wake()  # memory for the weights first, for the KV cache once they are in: the documented order
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream(), "is_checkpoint_format": True})
            if self.asleep:
                self.llm.wake_up(tags=["kv_cache"])
                self.asleep = False
            if not self.llm.reset_prefix_cache():
                raise UserError("vLLM did not reset its prefix cache after the weight sync; is a request still running?")
        compare_names(sent, self.names)
        if not check:
            return None
        held = self.llm.apply_model(parameter_sums)[0]
        unquantised = {name: pair for name, pair in sent.items() if name in held}  # native kernels hold codes of the others
        compare_sums(unquantised, held, self.tensor_parallel)
        compare_sums(self.buffers, self.llm.apply_model(buffer_sums)[0])
        return held

    def untied(self, named_weights):
        """The pairs, with the embedding once more as lm_head.weight where the learner ties the two."""
        for name, w in named_weights:
            yield name, w
            if self.tied and name.endswith("embed_tokens.weight"):
                yield "lm_head.weight", w

    def sleep(self):
        """Give the GPU memory back until the next sync: level 1 keeps the weights in CPU memory, level 2 drops them, level 0
        does nothing."""
        if self.sleep_level and not self.asleep:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True

    def wake(self):
        """Memory for the weights, still empty; `sync`, which must follow, fills them and then brings the KV cache back."""
        if self.asleep:
            torch.cuda.empty_cache()  # what the learner freed must be the device's before vLLM asks for it
            self.llm.wake_up(tags=["weights"])

    def close(self):
        """Shut the engine down, free its memory and remove its folder."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()  # vLLM's objects point at each other
        self.folder.cleanup()


@contextlib.contextmanager
def failures_explained(memory_fraction):
    """What can go wrong inside vLLM as one line that names the flag; a run's checkpoints stay as they are."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"vLLM: out of GPU memory ({first}); lower --vllm-memory {memory_fraction:g} or --micro-tokens, then --resume"
        ) from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"vLLM: {' '.join(str(error).split())[:300]} (--vllm-memory is {memory_fraction:g})") from error
    except (EngineDeadError, EngineGenerateError) as error:
        cause = error.__cause__ or error.__context__ or error
        raise UserError(f"vLLM's engine died ({type(cause).__name__}: {cause}); go on with --resume") from error


def check_tensor_parallel(size, kv_heads):
    """--vllm-tp N takes N processes with one GPU each, started by a launcher: vLLM's external_launcher executor."""
    if size > kv_heads:
        raise UserError(f"--vllm-tp {size}: the model has {kv_heads} key-value heads, and copies of them cannot be checked")
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if size > 1 and world % size:
        raise UserError(f"--vllm-tp {size} needs a multiple of {size} processes, found {world}: "
                        f"accelerate launch --num_processes {size} ...")


def engine_quantisation(model, recipe, kernels, device, backend=None, grad_dtype=None, power_of_two=False, fp32_products=False,
                        keep_bf16=""):
    """(LLM's quantization argument, entries for the model's config.json) of a recipe and a kind of kernels."""
    granularity = precision.recipe_of(recipe)["granularity"]
    if kernels == "native":
        if device.type != "cuda":
            raise UserError("--rollout-kernels native: vLLM has no FP8 kernels on a CPU; use aligned")
        if granularity is None:
            return None, {}
        return {"tensor": "fp8_per_tensor", "row": "fp8_per_channel", "block": "fp8_per_block"}[granularity], {}
    names = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    kept = {int(p) for name in precision.kept_by_position(names, keep_bf16) for p in name.split(".") if p.isdigit()}
    backend = backend or precision.default_backend(device)
    entry = {"quant_method": "aligned", "granularity": granularity, "backend": backend, "power_of_two": power_of_two}
    return "aligned", {"quantization_config": entry | {"fp32_products": fp32_products, "kept": sorted(kept)}}


def fused_name(name, packed):
    """The learner's parameter name as vLLM's model has it: model.layers.0.self_attn.q_proj.weight -> ...qkv_proj.weight."""
    for fused, parts in packed.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{fused}.")
    return name


def compare_names(sent, held):
    """Raise UserError unless every parameter of the engine was sent and every one sent has a place there."""
    odd = sorted(sent.keys() ^ held)
    if odd:
        raise UserError(f"weight sync: {len(sent)} tensors sent, {len(held)} held by vLLM; first odd name {odd[0]!r}")


def compare_sums(sent, held, copies=1):
    """Raise UserError unless the engine holds what was sent, to the rounding of a float64 sum. copies: tensor-parallel ranks,
    whose sums were added: a sharded weight then sums to what was sent, a replicated one (norms) to `copies` times that."""
    for name, (total, absolute) in sent.items():
        close = any(
            abs(held[name][0] - k * total) <= 1e-9 * k * absolute and abs(held[name][1] - k * absolute) <= 1e-9 * k * absolute
            for k in {1, copies}
        )
        if not close:
            raise UserError(f"weight sync: vLLM's {name} sums to {held[name]}, the learner's to {(total, absolute)}")
