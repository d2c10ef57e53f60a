"""Checks and speed, side by side in one run.

    python bench.py gpu         every FP8 recipe through `scaled_mm` against float64 and against `emulate`: output and both
                                gradients, odd token counts, layouts; then ten steps of the demo. Under 5 minutes on one GPU
                                (compute capability 8.9 or newer, torch 2.11 or newer); needs torch, for the demo also what
                                train_grpo.py imports, never vLLM or a network. On a CPU the same through `emulate`.
    python bench.py rollout     the transformers engine in several precisions and `model.generate(output_logits=True)` with its
                                log-softmax, on the same prompts; medians and ratios, warm-up excluded. --vllm: vLLM too, each
                                round beginning with a weight sync, whose time is printed

Exit code 1 if a check fails.
"""

import os
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

import fp8
from errors import Flags, UserError, check_device, number, run_main

HERE = os.path.dirname(os.path.abspath(__file__))
BOUNDS = {"tensor": 0.05, "row": 0.04, "block": 0.04}  # relative error of an E4M3 GEMM of Gaussians against float64
E5M2_BOUND = 0.07  # gradients with 2 mantissa bits in dY
AGREE = 1e-2  # scaled_mm against emulate


# -----------------------------------------------------------------------------
# correctness


def gemms(granularity, backend, x, w, dy, grad_dtype, power_of_two):
    """Output, input gradient and weight gradient of an FP8Linear on BF16 x (T, K), w (N, K), dy (T, N), in float64."""
    linear = nn.Linear(w.shape[1], w.shape[0], bias=False, device=x.device, dtype=torch.bfloat16)
    linear.weight.data.copy_(w)
    fp8.FP8Linear.of(linear, granularity, backend, grad_dtype, power_of_two)
    x = x.detach().clone().requires_grad_(True)
    y = linear(x)
    y.backward(dy)
    return y.detach().double(), x.grad.double(), linear.weight.grad.double()


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


def check_recipes(device, backends):
    """Rows (recipe, T, K, N, backend, three errors against float64, worst disagreement with emulate, ok)."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for T, K, N in [(512, 768, 1024), (13, 256, 128), (1, 128, 256), (257, 384, 128), (1000, 1536, 512)]:
        x, w, dy = (torch.randn(*s, generator=generator).to(torch.bfloat16).to(device) for s in ((T, K), (N, K), (T, N)))
        X, W, D = x.double(), w.double(), dy.double()
        exact = (X @ W.t(), D @ W, D.t() @ X)
        for granularity in fp8.GRANULARITIES:
            for grads, pow2 in (("e4m3", False), ("e5m2", False), ("e4m3", True)):
                grad_dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[grads]
                reference = gemms(granularity, "emulate", x, w, dy, grad_dtype, pow2)
                for backend in backends[granularity]:
                    ours = reference if backend == "emulate" else gemms(granularity, backend, x, w, dy, grad_dtype, pow2)
                    errors = [error(a, b) for a, b in zip(ours, exact, strict=True)]
                    apart = max(error(a, b) for a, b in zip(ours, reference, strict=True))
                    bounds = [BOUNDS[granularity]] + [E5M2_BOUND if grads == "e5m2" else BOUNDS[granularity]] * 2
                    ok = all(e <= b for e, b in zip(errors, bounds, strict=True)) or T < 100  # few elements: large spread
                    ok = ok and max(errors) < 0.15 and apart <= AGREE
                    name = f"fp8-{granularity}{' e5m2 grads' * (grads == 'e5m2')}{' pow2' * pow2}"
                    rows.append((name, T, K, N, backend, errors, apart, ok))
    return rows


def check_layouts(device):
    """Wrong layouts and pairs of formats are refused by us before a kernel sees them."""
    a = torch.zeros(32, 64, device=device).to(torch.float8_e4m3fn)
    b = torch.zeros(48, 64, device=device).to(torch.float8_e4m3fn)
    e5 = torch.float8_e5m2
    wrong = {
        "column-major first operand": (a.t().contiguous().t(), b.t()),
        "row-major second operand": (a, b.t().contiguous()),
        "E5M2 x E5M2": (a.float().to(e5), b.float().to(e5).t()),
        "K not a multiple of 16": (a[:, :40].contiguous(), b[:, :40].contiguous().t()),
    }
    results = []
    for name, pair in wrong.items():
        try:
            fp8.check_scaled_mm(*pair, "row")
            results.append((name, False))
        except ValueError:
            results.append((name, True))
    return results


def bench_gpu(args):
    check_device(args.device)
    device = torch.device(args.device)
    backends = {g: ["emulate", "scaled_mm"] for g in fp8.GRANULARITIES}
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, ", end="")
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name(device)}, compute capability {torch.cuda.get_device_capability(device)}")
    else:
        print(f"{device.type}: scaled_mm has no block kernel here")
    for granularity in fp8.GRANULARITIES:
        try:
            fp8.check_backend("scaled_mm", granularity, device)
        except ValueError as refusal:
            print(f"scaled_mm, {granularity}: {refusal}")
            backends[granularity] = ["emulate"]
    print(f"{'recipe':24} {'T':>5} {'K':>5} {'N':>5} {'backend':10} {'output':>8} {'dX':>8} {'dW':>8} {'vs emulate':>10}")
    rows = check_recipes(device, backends)
    for name, T, K, N, backend, errors, apart, ok in rows:
        numbers = " ".join(f"{e:8.4f}" for e in errors)
        print(f"{name:24} {T:5} {K:5} {N:5} {backend:10} {numbers} {apart:10.1e} {'ok' if ok else 'FAILED'}")
    layouts = check_layouts(device)
    for name, ok in layouts:
        print(f"refused: {name}: {'ok' if ok else 'FAILED'}")
    failed = sum(not row[-1] for row in rows) + sum(not ok for _, ok in layouts)
    if args.demo_steps:
        flags = ["--preset", "demo", "--steps", str(args.demo_steps), "--eval-every", "0", "--out", args.out]
        flags += ["--device", args.device]
        done = subprocess.run([sys.executable, os.path.join(HERE, "train_grpo.py"), *flags])
        failed += done.returncode != 0
        verdict = "ok" if done.returncode == 0 else f"FAILED, exit code {done.returncode}"
        print(f"{args.demo_steps} steps of the demo: {verdict}")
    print(f"{len(rows) + len(layouts)} checks, {failed} failed")
    sys.exit(1 if failed else 0)


# -----------------------------------------------------------------------------
# speed of sampling


def timed(function, device):
    """(seconds, tokens) of function(), which returns a token count."""
    start = time.perf_counter()
    tokens = function()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, tokens


def generate_baseline(model, tokenizer, prompts, max_tokens, eos):
    """transformers' own sampling with the log-probs one needs for RL; counts tokens up to and including the first EOS."""
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    with torch.no_grad():
        out = model.generate(
            **batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_tokens, eos_token_id=eos,
            pad_token_id=eos[0], output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        sampled = out.sequences[:, batch["input_ids"].shape[1] :]
        logps = [torch.log_softmax(x.float(), -1).gather(1, y[:, None]) for x, y in zip(out.logits, sampled.t(), strict=True)]
        torch.cat(logps, 1)
    ended = torch.isin(sampled, torch.tensor(eos, device=sampled.device)).int()
    return int((ended.cumsum(1) - ended == 0).sum())


def bench_rollout(args):
    import data
    import precision
    import tiny
    from rollout import make_engine

    path = tiny.prepare() if args.model == "tiny" else args.model
    runs, before, syncs = {}, {}, {}  # name -> tokens sampled by one call; what comes before it; seconds of that
    for recipe in args.precisions:
        model, tokenizer, _ = precision.load_model(path, recipe, args.device)
        prompts = [row["prompt_ids"] for row in data.load(args.data, tokenizer)[: args.sequences]]
        engine = make_engine("hf", model, tokenizer, recipe, max_rows=args.sequences)

        def sample(engine=engine, prompts=prompts):
            completions = engine.generate(prompts, 1, 1.0, args.max_tokens, seed=0)
            return sum(len(c.token_ids) for c in completions)

        def baseline(model=model, tokenizer=tokenizer, prompts=prompts, eos=engine.eos):
            return generate_baseline(model, tokenizer, prompts, args.max_tokens, eos)

        runs[f"generate {recipe}"], runs[f"engine {recipe}"] = baseline, sample
        if args.vllm:
            vllm = make_engine("vllm", model, tokenizer, recipe, max_rows=args.sequences, compile=args.vllm_compile)
            runs[f"vllm {recipe}"] = lambda vllm=vllm, prompts=prompts, sample=sample: sample(vllm, prompts)
            before[f"vllm {recipe}"] = lambda vllm=vllm, model=model: vllm.sync(model.named_parameters(), check=False)
    times = {name: [] for name in runs}
    for k in range(args.repeats + 1):  # the first round is warm-up; rounds interleave, so that a slow minute hits all alike
        for name, run in runs.items():
            if name in before:
                syncs.setdefault(name, []).append(timed(before[name], args.device)[0])
            seconds, tokens = timed(run, args.device)
            if k:
                times[name].append(tokens / seconds)
    where = f"{args.device}, {torch.get_num_threads()} threads"
    lengths = sorted(len(p) for p in prompts)
    print(f"{path}, {args.data}: {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, "
          f"up to {args.max_tokens} sampled, {where}")
    yardstick = next(iter(times))
    first = statistics.median(times[yardstick])
    for name, speeds in times.items():
        middle = statistics.median(speeds)
        spread = f"{min(speeds):.0f} to {max(speeds):.0f}, {len(speeds)} runs"
        print(f"{name:22} {middle:8.0f} tok/s ({spread})   {middle / first:5.2f} of {yardstick}")
        if name in syncs:
            sync, sampling = statistics.median(syncs[name][1:]), args.sequences * args.max_tokens / middle
            share = f"{sync / (sync + sampling):.1%} of sync and sampling {args.sequences} x {args.max_tokens} tokens"
            print(f"{name:22} {1000 * sync:8.0f} ms a weight sync, {share}")


def main():
    parser = Flags(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["gpu", "rollout"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--demo-steps", type=number(int, 0), default=10, help="gpu: steps of the demo at the end; 0 = none")
    parser.add_argument("--out", default="out/bench", help="gpu: run folder of the demo steps")
    parser.add_argument("--model", default="tiny", help="rollout: folder, or `tiny`")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8-row"], help="rollout: recipes; generate: yardstick")
    parser.add_argument("--vllm-compile", action="store_true", help="rollout: with vLLM's own compilation; a slow start")
    parser.add_argument("--vllm", action="store_true", help="rollout: vLLM with the learner's quantiser as well")
    parser.add_argument("--data", default="arith:train", help="rollout: prompts, as train_grpo.py's --data")
    parser.add_argument("--sequences", type=number(int, 1), default=64, help="rollout")
    parser.add_argument("--max-tokens", type=number(int, 1), default=64, help="rollout")
    parser.add_argument("--repeats", type=number(int, 1), default=5, help="rollout")
    args = parser.parse_args()
    if args.vllm_compile and not args.vllm:
        raise UserError("--vllm-compile has no effect without --vllm; give both")
    if args.what == "gpu" and args.demo_steps and os.path.exists(args.out):
        raise UserError(f"--out {args.out} exists; delete it or choose another folder for the demo steps")
    bench_gpu(args) if args.what == "gpu" else bench_rollout(args)


if __name__ == "__main__":
    run_main(main)
