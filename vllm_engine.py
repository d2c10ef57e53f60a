"""The vLLM engine: real vLLM, on CPU or GPU, sampling with the learner's own quantiser, and weights that arrive every step.

One quantiser on both sides. vLLM's own FP8 kernels scale and round differently from the learner's FP8Linear. Here the linear
layers of vLLM's model run `fp8.make_operand` and `fp8.gemm`, the functions of the learner, through vLLM's public
`register_quantization_config`: no patching. vLLM fuses q, k, v into one matrix and gate, up into another; tensor and block
scales are taken per logical shard, so that they are those of the learner's separate layers (row scales do not care).

Weights. The engine starts from a temporary folder with config, tokenizer and dummy weights; `sync` streams the learner's BF16
tensors through vLLM's public reload (`collective_rpc("reload_weights")`), which hands them to the model's own loader layer by
layer and lets the quantisation method quantise anew: once per sync, not once per call. Then the prefix cache, which holds KV
of old weights, is reset, and a fingerprint (sum and absolute sum of every parameter, fused ones compared with the sum of their
parts) is checked against the learner's: an unknown, missing or stale weight is an error, not a slow drift. Tied embeddings are
untied on vLLM's side: its reload leaves a tied lm_head with old weights.

Sampling. Token ids in, token ids out; each answer is its own request with its own seed; the sampled token's processed log-prob
is found by its id. The engine's global side effects are contained: RNG states are put back after the start and each call.
"""

import contextlib
import os
import tempfile

import torch

import fp8
import precision
from errors import UserError
from rollout import Completion, check_prompts, eos_ids, row_seed
from runlog import write_json

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: weights are handed over, not copied
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams  # noqa: E402  after the settings above, which vLLM reads at import
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase  # noqa: E402
from vllm.model_executor.layers.quantization import register_quantization_config  # noqa: E402
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig  # noqa: E402
from vllm.model_executor.parameter import ModelWeightParameter  # noqa: E402
from vllm.model_executor.utils import set_weight_attrs  # noqa: E402


@register_quantization_config("aligned")
class AlignedConfig(QuantizationConfig):
    """vLLM's side of a recipe: `granularity` None for high precision, the layers that `convert` skips left out."""

    def __init__(self, granularity=None, backend="emulate", power_of_two=False, kept=()):
        super().__init__()
        self.granularity, self.backend, self.power_of_two, self.kept = granularity, backend, power_of_two, set(kept)

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
        return cls(config["granularity"], config["backend"], config["power_of_two"], config["kept"])

    def get_quant_method(self, layer, prefix):
        if not isinstance(layer, LinearBase):
            return None  # embeddings, lm_head, attention
        parts = prefix.split(".")
        skip = any(p in precision.SKIPPED_NAMES or p.startswith("embed") for p in parts)
        skip = skip or any(p.isdigit() and int(p) in self.kept for p in parts)
        return AlignedLinear(None if skip else self.granularity, self.backend, self.power_of_two)


class AlignedLinear(LinearMethodBase):
    """A linear layer of vLLM's model computed as the learner computes it; granularity None: F.linear."""

    def __init__(self, granularity, backend, power_of_two):
        self.granularity, self.backend, self.power_of_two = granularity, backend, power_of_two

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
        if self.granularity and input_size_per_partition != input_size:
            raise UserError(
                "--vllm-tp: a shard of the input features would get scales of its own; use --rollout-kernels native"
            )
        layer.shard_sizes = list(output_partition_sizes)  # q, k, v or gate, up: the learner's separate layers
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=weight_loader)
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, attributes)

    def process_weights_after_loading(self, layer):
        if self.granularity is None:
            return
        operands = []
        for shard in layer.weight.data.split(layer.shard_sizes):
            operands.append(
                fp8.make_operand(
                    shard.to(torch.bfloat16),
                    self.granularity,
                    torch.float8_e4m3fn,
                    self.backend,
                    (fp8.BLOCK, fp8.BLOCK),
                    self.power_of_two,
                )
            )
        if self.backend == "emulate":  # one GEMM for all shards: scales spread over the rows they belong to
            scales = [fp8.expand_scale(o.scale, (len(o.codes), o.scale.shape[1])).expand(len(o.codes), -1) for o in operands]
            operands = [fp8.Operand(torch.cat([o.codes for o in operands]), torch.cat(scales))]
        layer.operands = operands

    def apply(self, layer, x, bias=None):
        if self.granularity is None:
            return torch.nn.functional.linear(x, layer.weight, bias)
        flat = x.reshape(-1, x.shape[-1])
        a = fp8.make_operand(flat, self.granularity, torch.float8_e4m3fn, self.backend, power_of_two=self.power_of_two)
        y = torch.cat([fp8.gemm(a, b, self.granularity, self.backend, x.dtype) for b in layer.operands], -1)
        y = y.reshape(*x.shape[:-1], -1)
        return y if bias is None else y + bias.to(y.dtype)


@contextlib.contextmanager
def rng_untouched():
    """vLLM seeds the global generators at its start and draws from them in generate: put their states back."""
    state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def parameter_sums(model):
    """(sum, absolute sum) in float64 of every parameter; runs inside vLLM's worker."""
    return {name: (p.double().sum().item(), p.double().abs().sum().item()) for name, p in model.named_parameters()}


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
        max_model_len=None,
        backend=None,
        grad_dtype="e4m3",
        power_of_two=False,
        keep_bf16="",
    ):
        device = model.device
        config = model.config.get_text_config()
        self.eos, self.vocab = eos_ids(model, tokenizer), len(tokenizer)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos[0]
        self.context = min(max_model_len or 2**31, getattr(config, "max_position_embeddings", 2**31))
        self.dtype = precision.recipe_of(recipe)["dtype"]
        self.folder = tempfile.TemporaryDirectory(prefix="vllm-")
        quantisation, extra = engine_quantisation(model, recipe, kernels, backend, power_of_two, keep_bf16)
        hf_config = model.config.to_dict() | {"dtype": str(self.dtype).removeprefix("torch.")}
        # vLLM's reload leaves a tied lm_head with old weights (packed apart on a CPU): untie there, send the embedding twice
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        hf_config |= {"architectures": [type(model).__name__], "tie_word_embeddings": False} | extra
        write_json(os.path.join(self.folder.name, "config.json"), hf_config)
        tokenizer.save_pretrained(self.folder.name)
        gpu = device.type == "cuda"
        gpu_only = {"enable_sleep_mode": True, "gpu_memory_utilization": memory_fraction}
        # A prompt prefilled in pieces makes vLLM rewind the request's generator, which a CPU generator cannot do: no pieces
        cpu_only = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(self.context, 2048)}
        set_num_threads = torch.set_num_threads
        with rng_untouched():
            self.llm = LLM(
                model=self.folder.name, dtype=str(self.dtype).removeprefix("torch."), load_format="dummy",
                quantization=quantisation, max_model_len=self.context, max_num_seqs=max_rows,
                logprobs_mode="processed_logprobs", enable_prefix_caching=True, enforce_eager=not gpu,
                disable_log_stats=True, seed=0,
                tensor_parallel_size=tensor_parallel,
                **(gpu_only if gpu else cpu_only),
            )  # fmt: skip
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it for the whole process
        self.packed = self.llm.apply_model(packed_modules)[0]

    def generate(self, prompt_ids, n=1, temperature=1.0, max_tokens=64, seed=0, progress=False, top_p=1.0):
        """As rollout.HFEngine.generate. A token whose log-prob vLLM did not return gets NaN, which the corrections count."""
        check_prompts(prompt_ids, max_tokens, self.context)
        requests, params = [], []
        for i, ids in enumerate(prompt_ids):
            for j in range(n):
                requests.append({"prompt_token_ids": ids})
                params.append(SamplingParams(
                    temperature=temperature, top_p=top_p, top_k=0, max_tokens=max_tokens, seed=row_seed(seed, i, j), logprobs=0,
                    stop_token_ids=self.eos, ignore_eos=True, detokenize=False, repetition_penalty=1.0,
                    allowed_token_ids=None,
                ))  # fmt: skip
        with rng_untouched():
            outputs = self.llm.generate(requests, params, use_tqdm=progress and os.isatty(2))
        return [self.completion(out.outputs[0]) for out in outputs]

    def completion(self, out):
        ids = list(out.token_ids)
        logps = [d[t].logprob if t in d else float("nan") for t, d in zip(ids, out.logprobs, strict=True)]
        return Completion(ids, logps, "stop" if out.finish_reason == "stop" else "length")

    @torch.no_grad()
    def sync(self, named_weights):
        """Stream the learner's weights in, reset the prefix cache, compare fingerprints. named_weights: (name, tensor) pairs;
        each tensor is rounded to the engine's dtype on the way. Returns the fingerprint; raises UserError where the engine
        holds something else than was sent."""
        sent = {}

        def stream():
            for name, w in self.untied(named_weights):
                w = w.detach().to(self.dtype)
                fused = fused_name(name, self.packed)
                total, absolute = sent.get(fused, (0.0, 0.0))
                sent[fused] = (total + w.double().sum().item(), absolute + w.double().abs().sum().item())
                yield name, w

        with rng_untouched():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream(), "is_checkpoint_format": True})
            if not self.llm.reset_prefix_cache():
                raise UserError("vLLM did not reset its prefix cache after the weight sync; is a request still running?")
        held = self.llm.apply_model(parameter_sums)[0]
        compare_fingerprints(sent, held)
        return held

    def untied(self, named_weights):
        """The pairs, with the embedding once more as lm_head.weight where the learner ties the two."""
        for name, w in named_weights:
            yield name, w
            if self.tied and name.endswith("embed_tokens.weight"):
                yield "lm_head.weight", w

    def sleep(self, level=2):
        """Give the GPU memory back: level 1 keeps the weights in CPU memory, level 2 drops them (the next sync brings them)."""
        if torch.cuda.is_available():
            self.llm.sleep(level=level)

    def wake(self):
        """Weights first; the KV cache comes back after the sync that follows (documented order for shared GPUs)."""
        if torch.cuda.is_available():
            self.llm.wake_up(tags=["weights"])

    def close(self):
        """Shut the engine down and remove its folder."""
        self.llm.llm_engine.engine_core.shutdown()
        self.folder.cleanup()


def engine_quantisation(model, recipe, kernels, backend, power_of_two, keep_bf16):
    """(LLM's quantization argument, entries for the model's config.json) of a recipe and a kind of kernels."""
    granularity = precision.recipe_of(recipe)["granularity"]
    if kernels == "native":
        if model.device.type != "cuda":
            raise UserError("--rollout-kernels native: vLLM has no FP8 kernels on a CPU; use aligned")
        if granularity is None:
            return None, {}
        return {"tensor": "fp8_per_tensor", "row": "fp8_per_channel", "block": "fp8_per_block"}[granularity], {}
    names = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    kept = {int(p) for name in precision.kept_by_position(names, keep_bf16) for p in name.split(".") if p.isdigit()}
    backend = backend or precision.default_backend(model.device)
    entry = {"quant_method": "aligned", "granularity": granularity, "backend": backend, "power_of_two": power_of_two}
    return "aligned", {"quantization_config": entry | {"kept": sorted(kept)}}


def fused_name(name, packed):
    """The learner's parameter name as vLLM's model has it: model.layers.0.self_attn.q_proj.weight -> ...qkv_proj.weight."""
    for fused, parts in packed.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{fused}.")
    return name


def compare_fingerprints(sent, held):
    """Raise UserError unless the engine holds what was sent: names, then sums, to the rounding of a float64 sum."""
    odd = sorted(sent.keys() ^ held.keys())
    if odd:
        raise UserError(f"weight sync: {len(sent)} tensors sent, {len(held)} held by vLLM; first odd name {odd[0]!r}")
    for name, (total, absolute) in sent.items():
        if not (abs(held[name][0] - total) <= 1e-9 * absolute and abs(held[name][1] - absolute) <= 1e-9 * absolute):
            raise UserError(f"weight sync: vLLM's {name} sums to {held[name]}, the learner's to {(total, absolute)}")
