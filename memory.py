"""How much memory training takes, on a GPU and on the host: bytes from a model's config and the flags, nothing loaded.

    python memory.py                                                  Qwen3-8B, 14B and 32B on 8 x 80 GiB
    python memory.py --size 32B --processes 16 --activation-checkpointing --vllm-tp 4
    python memory.py --model out/smollm2 --processes 1 --gpu-gib 24

P: parameters, R: those outside the decoder layers, L: one layer's, V x H: lm_head; W: processes; T: --micro-tokens; e: bytes of
an activation and of a published weight (2 in BF16; 4 in recipe fp32 and with --activations fp32). On each GPU:

    published         e P / W        what the forward uses; 0 in recipe fp32: the masters are the parameters        exact
    masters           4 P / W        FP32, and as much for `gradients`; `adamw` (two moments): 8 P / W              exact
    reference         e P / W        --kl-coef: a frozen published copy; W = 1: and its cached FP8 operands         exact
    weight_codes      1-8 a weight   W = 1: operands cached by FP8Linear; under FSDP2 nothing is                    exact
    learner           sum of these   at all times on the GPU; with --cpu-offload on the host
    unsharded_root    e R            W > 1: embeddings, final norm, lm_head, whole from forward to backward         exact
    unsharded_layers  2 e L          W > 1: the layer at work and the one fetched ahead                             FSDP2's rule
    layer_gradients   (e + 4) L      W > 1: a layer's, and the FP32 buffer they are reduced in; W = 1: e times      FSDP2's rule
                                     the largest matrix, since each gradient is added to its FP32 sum at once
    activations       T x below      saved for backward                                                             measured
    recomputed        T x below      --activation-checkpointing: one layer's, whose forward runs again              measured
    work              (e + 8) T MLP  gradients of activations, quantisers' FP32 copies; block: e + 12, no FP8: 2 e  estimate
    head_chunk        16 x chunk     four FP32 copies of CHUNK logits, and e T H: the gradient of hidden states     estimate
    head_gradient     e V H          lm_head's, summed over chunks; waits for the end of the backward (W > 1)       exact
    overhead          1.5 GiB        CUDA context, NCCL, what a sleeping vLLM keeps                                 estimate

    at_head         activations + unsharded_layers + head_chunk + 2 head_gradient (one being added to the other)
    at_layers       activations + recomputed + work + unsharded_layers + layer_gradients + head_gradient
    at_root         (e + 4) R, W > 1: the root's gradients and the FP32 buffer they are reduced in; no activation is left
    training_peak   learner + overhead + unsharded_root + the largest of these three moments of the backward
    vllm            --vllm-memory of the GPU: vllm_weights (the published and, beside them, FP8 codes: --rollout-kernels
                    aligned), overhead, KV cache. All but the overhead is given back while the learner trains
    sampling_peak   learner + vllm
    kv_tokens       tokens that an engine's KV cache holds, on its --vllm-tp GPUs together

What autograd saves per token and decoder layer (Q, K: widths of queries and keys; h, h_kv: their heads; MLP: its width), in
nn.Linear and FP8Linear alike, since quantised operands are not kept:

    2 (4 + 2 e) H + 8                  two norms: input in FP32, normalised input; output, which the next linear layers share
    (4 + e)(Q + K) + 4 (h + h_kv)      norms of queries and keys (Qwen3; Llama has none)
    2 e (Q + K) + 4 h                  attention: rotated queries and keys, values, output; the softmax's log-sum
    4 e MLP                            gate, silu(gate), up, their product

With checkpointing only a layer's input, e H. All tokens are taken for response tokens, the worst case. The host, if all
processes are on one: host_start, whole FP32 weights in every process (W > 1: and what they are rounded or copied to) until they
are sharded; host_train, offloaded; host_save, that and 12 P that rank 0 gathers for a checkpoint. Not counted: fragmentation
(leave 5 %), file cache, data; with e = 4 and grouped queries, 4 h x length a token, which CUDA's fallback for FP32 attention
saves. tests/test_memory.py compares with tensors and the allocator's peak on a CPU, for one process and one of eight; no GPU.
"""

import copy
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

import fp8
from errors import Flags, UserError, number, run_main
from logprob import CHUNK
from parallel import decoder_layers
from precision import RECIPES, convert, converted_layers, recipe_of
from stats import markdown

GIB = 2**30
OVERHEAD = 3 * GIB // 2
# published shapes of Qwen3: hidden size, layers, heads, MLP width; all with 8 key-value heads of 128 and untied embeddings
SIZES = {"8B": (4096, 36, 32, 12288), "14B": (5120, 40, 40, 17408), "32B": (5120, 64, 64, 25600)}
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def qwen3(size):
    """The config of a published size."""
    hidden, layers, heads, width = SIZES[size]
    return Qwen3Config(
        vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        head_dim=128, intermediate_size=width, max_position_embeddings=40960, tie_word_embeddings=False,
    )  # fmt: skip


def meta_model(config, recipe, backend):
    """The model without memory, converted to the recipe; UserError unless its layers are built as the formulas suppose."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except (ValueError, AttributeError) as error:
        raise UserError(f"--model: no language model can be made from its config: {str(error).splitlines()[0]}") from error
    for layer in decoder_layers(model):
        parts = dict(layer.named_modules())
        odd = next((name for name in LINEARS if not isinstance(parts.get(name), torch.nn.Linear)), None)
        if odd:
            raise UserError(f"--model: a decoder layer has no linear {odd} (a mixture of experts?): what it saves is unknown")
    convert(model, recipe, backend=backend)
    return model


def check(config, recipe, activations, backend, processes, offload, tp):
    """Raise UserError for what no run can have."""
    assert activations in ("bf16", "fp32"), activations
    if activations == "fp32" and recipe_of(recipe)["granularity"] and backend == "scaled_mm":
        raise UserError("--activations fp32 and --fp8-backend scaled_mm, whose kernels write BF16: leave one of the two out")
    if offload and processes == 1:
        raise UserError("--cpu-offload moves the shards of several processes, not of --processes 1; leave it out")
    if processes % tp or config.num_key_value_heads % tp:
        raise UserError(f"--vllm-tp {tp} does not divide {processes} processes, {config.num_key_value_heads} key-value heads")


def saved_per_token(layer, config, e):
    """Bytes that autograd saves in one decoder layer for each token."""
    H, MLP = layer.mlp.gate_proj.in_features, layer.mlp.gate_proj.out_features
    Q, K = layer.self_attn.q_proj.out_features, layer.self_attn.k_proj.out_features
    h, h_kv = config.num_attention_heads, config.num_key_value_heads
    norms = (4 + e) * (Q + K) + 4 * (h + h_kv) if hasattr(layer.self_attn, "q_norm") else 0
    return 2 * (4 + 2 * e) * H + 8 + norms + 2 * e * (Q + K) + 4 * h + 4 * e * MLP


def operand_bytes(layer, e):
    """What an FP8Linear caches: bytes of (the output GEMM's operand, what a backward adds). Emulated codes have e bytes."""
    N, K = layer.weight.shape
    codes = N * K * (1 if layer.backend == "scaled_mm" else e)
    if layer.granularity == "row":  # one scale per output channel; for the transposed weight one per input channel
        return codes + 4 * N, codes + 4 * K
    scales = 1 if layer.granularity == "tensor" else -(-N // fp8.BLOCK) * -(-K // fp8.BLOCK)
    return codes + 4 * scales, codes if layer.backend == "scaled_mm" else 0  # emulate: a transposed view is enough


def learner_state(model, e, recipe, processes, reference):
    """Bytes of what is there at all times."""
    # FSDP2 splits the first dimension, padded to a multiple of the processes
    P = sum(-(-len(p) // processes) * (p.numel() // len(p)) for p in model.parameters())
    cached = [operand_bytes(layer, e) for layer in converted_layers(model)] if processes == 1 else []
    return {
        "published": e * P if recipe_of(recipe)["dtype"] != torch.float32 else 0, "masters": 4 * P, "gradients": 4 * P,
        "adamw": 8 * P, "reference": (e * P + sum(first for first, _ in cached)) * reference,
        "weight_codes": sum(map(sum, cached)),
    }  # fmt: skip


def transients(model, config, e, T, sharded, checkpointing):
    """Bytes that come and go in a forward and backward, and the three moments of the backward that may be its peak."""
    layers, converted = decoder_layers(model), converted_layers(model)
    V, H = model.get_output_embeddings().weight.shape
    sizes = [p.numel() for p in layers[0].parameters()]
    L = sum(sizes)
    R = sum(p.numel() for p in model.parameters()) - L * len(layers)
    saved, MLP = saved_per_token(layers[0], config, e), layers[0].mlp.gate_proj.out_features
    extra = {"tensor": 8, "row": 8, "block": 12}[converted[0].granularity] if converted else e
    last = (4 + 2 * e) * H + 4 + 8  # the final norm; the response tokens' hidden states and ids
    b = {
        "unsharded_root": e * R * sharded, "unsharded_layers": 2 * e * L * sharded,
        "layer_gradients": (e + 4) * L if sharded else e * max(sizes),
        "activations": T * (len(layers) * (e * H if checkpointing else saved) + last),
        "recomputed": T * saved * checkpointing,
        "work": (e + extra) * (max(T, H) if converted else T) * MLP,  # weights are quantised too
        "head_chunk": 16 * min(max(CHUNK // V, 1), T) * V + e * T * H, "head_gradient": e * V * H, "overhead": OVERHEAD,
    }  # fmt: skip
    # one process: lm_head's gradient is in the FP32 one by then, unless tied: the embedding's has yet to be added to it
    waiting = sharded or config.tie_word_embeddings
    b["at_head"] = b["activations"] + b["unsharded_layers"] + b["head_chunk"] + 2 * b["head_gradient"]
    b["at_layers"] = sum(b[k] for k in ("activations", "recomputed", "work", "unsharded_layers", "layer_gradients"))
    b["at_layers"] += b["head_gradient"] * waiting
    b["at_root"] = (e + 4) * R if sharded else b["head_gradient"] * (1 + waiting)
    return b


def budget(config, processes=8, micro_tokens=16384, precision="fp8-row", activations="bf16", backend="scaled_mm",
           checkpointing=False, offload=False, reference=False, tp=1, vllm_memory=0.4, gpu_gib=80):
    """name -> bytes, as listed above; `parameters` and `kv_tokens` are counts. config: of a text model built like Qwen3 or
    Llama. Raises UserError where no such run can be."""
    model = meta_model(config, precision, backend)
    check(config, precision, activations, backend, processes, offload, tp)
    e = 4 if precision == "fp32" or activations == "fp32" else 2
    state = learner_state(model, e, precision, processes, reference)
    P, held = sum(p.numel() for p in model.parameters()), sum(state.values())
    b = {"parameters": P} | state | {"learner": 0 if offload else held}
    b |= transients(model, config, e, micro_tokens, processes > 1, checkpointing)
    b["training_peak"] = b["learner"] + b["overhead"] + b["unsharded_root"] + max(b["at_head"], b["at_layers"], b["at_root"])

    tied = model.get_output_embeddings().weight.numel() if config.tie_word_embeddings else 0  # vLLM has them twice
    codes = sum(operand_bytes(layer, e)[0] for layer in converted_layers(model))
    b["vllm"] = int(vllm_memory * gpu_gib * GIB)
    b["vllm_weights"] = (e * (P + tied) + codes) // tp
    b["sampling_peak"] = b["learner"] + b["vllm"]
    per_token = 2 * config.num_hidden_layers * decoder_layers(model)[0].self_attn.k_proj.out_features // tp * e
    b["kv_tokens"] = max(0, b["vllm"] - b["overhead"] - b["vllm_weights"]) // per_token

    copied = 0 if processes == 1 else 4 if reference else e if state["published"] else 0
    b["host_start"] = (4 + copied) * P * processes
    b["host_train"] = held * processes * offload
    b["host_save"] = b["host_train"] + 12 * P
    return b


def table(results):
    """Markdown: parts as rows, models as columns; parts that are 0 everywhere are left out."""
    def cell(name, value):
        return f"{value / 1e9:.2f}e9" if name == "parameters" else str(value) if name == "kv_tokens" else f"{value / GIB:.1f}"

    names = [name for name in next(iter(results.values())) if any(b[name] for b in results.values())]
    return markdown([{"GiB": name} | {model: cell(name, b[name]) for model, b in results.items()} for name in names])


def verdict(model, b, gpu_gib):
    """One line: whether the model fits, and what does not."""
    peaks = {"training": b["training_peak"] / GIB, "sampling": b["sampling_peak"] / GIB}
    short = [f"{phase} takes {peak:.1f} GiB of {gpu_gib:g}" for phase, peak in peaks.items() if peak > gpu_gib]
    if not b["kv_tokens"]:
        short.append(f"vLLM's weights leave its {b['vllm'] / GIB:.1f} GiB no KV cache: raise --vllm-memory or --vllm-tp")
    tight = ", but with less than 5 % free" * (max(peaks.values()) > 0.95 * gpu_gib)
    return f"{model} does not fit: {'; '.join(short)}" if short else f"{model} fits{tight}"


def parse_flags(argv=None):
    parser = Flags(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="transformers folder, of which only config.json is read")
    parser.add_argument("--size", nargs="+", choices=list(SIZES), help="published Qwen3 shapes; default: all of them")
    parser.add_argument("--processes", type=number(int, 1), default=8, help="one per GPU")
    parser.add_argument("--gpu-gib", type=number(float, above=0), default=80.0, help="memory of a GPU")
    parser.add_argument("--micro-tokens", type=number(int, 1), default=16384, help="padded tokens per forward and backward")
    parser.add_argument("--precision", choices=list(RECIPES), default="fp8-row")
    parser.add_argument("--fp8-backend", choices=fp8.BACKENDS, help="default: scaled_mm; emulate with --activations fp32")
    parser.add_argument("--activations", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--cpu-offload", action="store_true", help="the learner's weights, gradients and moments on the host")
    parser.add_argument("--kl-coef", type=number(float, 0), default=0.0, help="above 0 there is a frozen reference")
    parser.add_argument("--vllm-memory", type=number(float, above=0, high=1), default=0.4, help="share of the GPU's memory")
    parser.add_argument("--vllm-tp", type=number(int, 1), default=1, help="GPUs that share one engine")
    args = parser.parse_args(argv)
    if args.model and args.size:
        raise UserError(f"--model {args.model} and --size {' '.join(args.size)}: leave one of the two out")
    if args.model and not os.path.isfile(os.path.join(args.model, "config.json")):
        raise UserError(f"--model {args.model}: no folder with a config.json; give one saved by transformers' save_pretrained")
    args.fp8_backend = args.fp8_backend or ("emulate" if args.activations == "fp32" else "scaled_mm")
    return args


def main(argv=None):
    args = parse_flags(argv)
    configs = {f"Qwen3-{size}": qwen3(size) for size in args.size or SIZES}
    if args.model:
        try:
            configs = {args.model: AutoConfig.from_pretrained(args.model).get_text_config()}
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"--model {args.model}: its config does not load: {error}") from error
    settings = (args.processes, args.micro_tokens, args.precision, args.activations, args.fp8_backend,
                args.activation_checkpointing, args.cpu_offload, args.kl_coef > 0, args.vllm_tp, args.vllm_memory, args.gpu_gib)
    results = {name: budget(config, *settings) for name, config in configs.items()}
    print(table(results), *(verdict(name, b, args.gpu_gib) for name, b in results.items()), sep="\n\n")


if __name__ == "__main__":
    run_main(main)
