r"""Evaluation: avg@n, maj@n and pass@k on held-out problems, each with its standard error, in one precision or several.

Each problem is answered n times. An answer is right if its reward is above 0.5; c of problem i's n answers are right.

    avg@n     mean_i c_i / n                                 the accuracy of one answer, measured with n ("acc")
    pass@k    mean_i 1 - C(n - c_i, k) / C(n, k)             the chance that at least one of k answers is right; k = 1 is avg@n
    maj@n     mean_i [the answer most of the n voted for is right]
    se        std_i(x_i) / sqrt(problems), x_i: a problem's term of the mean above

"avg@32" is the mean over 32 answers, not pass@32. pass@k is the unbiased estimate: every k of the n answers count, so that
their order does not matter; "any of the first k" and drawing with replacement do not have this property. The standard error is
over problems, as answers to one problem are not independent; it is nan for a single problem. The average over data sets gives
each the same weight, and its se is sqrt(sum se^2) / sets.

Votes: equal answers vote together, whether by text or by the grader's equality with the form seen first (0.5, 1/2); a tie goes
to the answer seen first; an answer cut off or without a box (or ####) has no vote. The score of the winning form's first answer
decides, so that nothing is graded twice. Where a reward of its own finds answers right and none has a box, maj@n is nan.

Problems whose gold answer cannot be graded (reward NaN) are left out and counted ("excluded"). Every data set and precision
starts from the same --seed, in the way of train_grpo.py's own evaluation: precisions are compared on the same random numbers,
and the same flags give the same results.csv on the same machine.

    python eval.py --model out/demo --data arith:test --precision bf16 fp8-row --n 8     # its newest checkpoint
    python eval.py --model Qwen/Qwen3-1.7B --data aime24 aime25 math-500 --n 32 --problems 0 --max-tokens 8192 --top-p 0.95

--out DIR (default out/eval/MODEL) holds generations.jsonl (one answer a line), results.csv (a row per precision and data set,
and their average) and summary.json (flags, and the rows again with seconds and tokens per second of sampling).
"""

import csv
import itertools
import json
import math
import os
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import checkpoint
import data
import parallel
import precision
import reward
import sources
import tiny
from errors import Flags, UserError, check_device, json_object, number, run_main
from rollout import make_engine, row_seed
from runlog import plain, replacing, write_json

WIDTH = 120  # columns of the printed tables
VOTE_LIMIT = 1.0  # seconds the grader may spend on whether two answers are equal

# -----------------------------------------------------------------------------
# the numbers


def pass_at_k(n, c, k):
    """The share of the k-subsets of n answers, c of them right, that hold a right one: 1 - C(n-c, k) / C(n, k), exact."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not n={n}, c={c}, k={k}")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)  # of whole numbers: rounded once, c/n at k = 1


def majority(answers):
    """The answer with most votes, in the form seen first; see the module docstring. None only if no answer is given."""
    groups, group_of = [], {}  # groups: [form seen first, votes], in that order; group_of: text -> its group
    for answer in answers:
        text = "" if answer is None else " ".join(str(answer).split())
        if not text:
            continue
        if text not in group_of:
            comparable = reward.gold_problem(text) is None  # what the grader cannot read equals nothing but its own text
            equal = (g for g in groups if reward.grade(f"\\boxed{{{text}}}", str(g[0]), limit=VOTE_LIMIT) == 1)
            group_of[text] = (next(equal, None) if comparable else None) or [answer, 0]
            if not group_of[text][1]:
                groups.append(group_of[text])
        group_of[text][1] += 1
    return max(groups, key=lambda g: g[1])[0] if groups else None  # max: the first of equals


def default_ks(n):
    return [2**i for i in range(n.bit_length()) if 2**i < n] + [n]


def mean_se(values):
    """(mean, standard error) of a problem-wise list; NaNs are left out, the error is NaN for fewer than two."""
    values = [v for v in values if not math.isnan(v)]
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def summarise(scores, answers, n, ks=None):
    """acc, se, maj, maj_se, pass@k and its _se, reward (mean), problems, excluded, n from flat lists, n per problem."""
    assert len(scores) == len(answers) and len(scores) % n == 0, f"{len(scores)} scores, {len(answers)} answers, n {n}"
    problems = [(scores[i : i + n], answers[i : i + n]) for i in range(0, len(scores), n)]
    problems = [(s, a) for s, a in problems if not all(map(math.isnan, s))]
    graded = [[x for x in s if not math.isnan(x)] for s, _ in problems]
    counts = [(len(s), sum(x > 0.5 for x in s)) for s in graded]
    acc, se = mean_se([c / m for m, c in counts])
    with ThreadPoolExecutor(reward.WORKERS) as threads:  # they wait for the grading workers
        winners = list(threads.map(majority, [a for _, a in problems]))
    maj = [0.0 if w is None else s[a.index(w)] for (s, a), w in zip(problems, winners, strict=True)]
    maj = [x if math.isnan(x) else float(x > 0.5) for x in maj]
    if acc > 0 and all(w is None for w in winners):
        maj = [math.nan]
    summary = {"acc": acc, "se": se}
    summary["maj"], summary["maj_se"] = mean_se(maj)
    for k in ks or default_ks(n):
        values = [pass_at_k(m, c, k) for m, c in counts if m >= k]
        summary[f"pass@{k}"], summary[f"pass@{k}_se"] = mean_se(values)
    rewards = [x for s in graded for x in s]
    summary["reward"] = statistics.fmean(rewards) if rewards else math.nan
    return summary | {"problems": len(problems), "excluded": len(scores) // n - len(problems), "n": n}


def evaluate(engine, tokenizer, rows, n=4, temperature=1.0, max_tokens=64, seed=0, progress=True, top_p=1.0, ks=None,
             function=None, together=1):  # fmt: skip
    """Sample n answers per row and grade them: (summary, records).

    summary: summarise's, with len_mean (tokens), trunc_frac, tokens, seconds (sampling and grading), tok_per_s (sampling);
    records: one dict per answer, in order, for JSONL. ks: see pass@k, default powers of two; function: reward.score's.
    Several processes share the rows, `together` ranks in a row the same part, and all of them get the result.
    """
    start, seconds, bar = time.perf_counter(), [], progress and parallel.is_main()

    def own_part():
        first, end = parallel.block(len(rows), together)
        options = {"top_p": top_p} if top_p < 1 else {}  # engines need not know it otherwise
        options |= {"first": first} if first else {}
        prompts = [row["prompt_ids"] for row in rows[first:end]]
        completions = engine.generate(prompts, n, temperature, max_tokens, seed, progress=bar, **options)
        seconds.append(time.perf_counter() - start)
        texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        truncated = [c.finish_reason == "length" for c in completions]
        each = [row for row in rows[first:end] for _ in range(n)]
        scores = reward.score(each, texts, truncated, function=function, progress=bar)
        assert len(scores) == len(each), f"{len(scores)} rewards for {len(each)} answers"
        answers = [None if cut else reward.extract_answer(text) for text, cut in zip(texts, truncated, strict=True)]
        return list(zip(texts, truncated, scores, answers, [len(c.token_ids) for c in completions], strict=True))

    graded = parallel.meet(own_part, together)
    sampling = parallel.largest(seconds[0])
    texts, truncated, scores, answers, lengths = map(list, zip(*graded, strict=True))
    summary = summarise(scores, answers, n, ks)
    if not summary["problems"]:
        raise UserError("evaluation: no problem has a gold answer that can be graded")
    tokens = sum(lengths)
    summary |= {"len_mean": tokens / len(texts), "trunc_frac": sum(truncated) / len(truncated), "tokens": tokens}
    summary |= {"seconds": time.perf_counter() - start, "tok_per_s": tokens / sampling}
    each = [row for row in rows for _ in range(n)]
    records = [
        {"id": row["id"], "sample": i % n, "prompt": row["prompt"], "completion": text, "gold": row["answer"],
         "answer": answer, "reward": score, "finish_reason": "length" if cut else "stop"}
        for i, (row, (text, cut, score, answer, _)) in enumerate(zip(each, graded, strict=True))
    ]  # fmt: skip
    return summary, records


def average(summaries):
    """One summary over data sets: means of the means, sums of the counts."""
    out = {"n": summaries[0]["n"]}
    for key in [key for key in summaries[0] if key not in ("precision", "data", "n")]:
        values = [s[key] for s in summaries]
        if key in ("problems", "excluded", "tokens", "seconds"):
            out[key] = sum(values)
        else:
            out[key] = (math.hypot(*values) if key.endswith("se") else sum(values)) / len(values)
    return out


# -----------------------------------------------------------------------------
# the script


def parse_flags(argv=None):
    parser = Flags(description=__doc__.splitlines()[0])
    g = parser.add_argument_group("model and data")
    g.add_argument("--model", default="tiny", help="transformers, run or checkpoint folder, or hub name; `tiny` = embedded")
    g.add_argument("--data", nargs="+", default=["arith:test"], metavar="SPEC", help="data sets, see data.py")
    g.add_argument("--problems", type=number(int, 0), default=200, help="first so many problems of each; 0 = all")
    g.add_argument("--prompt-column")
    g.add_argument("--answer-column")
    g.add_argument("--system-prompt", help="for models with a chat template")
    g.add_argument("--prompt-format", help="see data.py")
    g.add_argument("--template-args", type=json_object, metavar="JSON", help="arguments of the chat template")
    g.add_argument("--max-prompt-tokens", type=number(int, 1), help="longer prompts are dropped, with a count")
    g.add_argument("--reward", metavar="FILE.py:function", help="grade with this function")
    g = parser.add_argument_group("sampling")
    g.add_argument("--n", type=number(int, 1), default=4, help="answers per problem")
    g.add_argument("--k", type=number(int, 1), nargs="+", help="k of pass@k, at most --n; default: 1, 2, 4, .. and n")
    g.add_argument("--temperature", type=number(float, 0), default=1.0, help="0 = greedy, with --n 1")
    g.add_argument("--top-p", type=number(float, above=0, high=1), default=1.0, help="smallest set of ids of this probability")
    g.add_argument("--max-tokens", type=number(int, 1), default=64, help="tokens per answer")
    g.add_argument("--engine", choices=["hf", "vllm"], default="hf", help="transformers, or real vLLM (CPU too)")
    g.add_argument("--vllm-compile", action="store_true", help="vllm: faster after a slow start")
    g.add_argument("--vllm-memory", type=number(float, above=0, high=1), help="vllm: share of the GPU's memory; default 0.4")
    g.add_argument("--rows", type=number(int, 1), default=256, help="sequences decoded at once")
    g.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0)
    g.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    g = parser.add_argument_group("precision")
    g.add_argument("--precision", nargs="+", default=["bf16"], metavar="RECIPE", help=", ".join(precision.RECIPES))
    g.add_argument("--fp8-backend", choices=["emulate", "scaled_mm"], help="default: scaled_mm on a GPU, emulate on a CPU")
    g.add_argument("--pow2-scales", action="store_true", help="round FP8 scales up to powers of two")
    g.add_argument("--keep-bf16", default="", help="decoder layers left in BF16 by position, e.g. first:1,last:1")
    parser.add_argument("--out", help="folder of the results; default out/eval/MODEL")
    args = parser.parse_args(argv)
    for recipe in args.precision:
        precision.recipe_of(recipe)
    for flag in ("data", "precision"):
        names = [set_name(x) for x in getattr(args, flag)]
        if len(set(names)) < len(names):
            raise UserError(f"--{flag} {' '.join(names)}: one is given twice")
    if parallel.launched() > 1:
        raise UserError(f"eval.py runs on one process, and was started as one of {parallel.launched()}; leave the launcher out")
    args.k = sorted(set(args.k or default_ks(args.n)))
    if args.k[-1] > args.n:
        raise UserError(f"--k {args.k[-1]} is above --n {args.n}: pass@k needs at least k answers per problem; raise --n")
    if args.temperature == 0 and args.n > 1:
        raise UserError(f"--temperature 0 gives the same answer --n {args.n} times; use --n 1, or a temperature above 0")
    return args


def set_name(spec):
    """What tables call a data set: NAME of NAME=PATH, else the spec."""
    return spec.partition("=")[0] if re.split("[:=]", spec)[0] in sources.PRESETS else spec


def find_model(model):
    """The folder (or hub name) that --model means."""
    if model == "tiny":
        return tiny.prepare()
    if os.path.isdir(os.path.join(model, "checkpoints")):
        path = checkpoint.latest(model)
        if path is None:
            raise UserError(f"--model {model}: this run has no complete checkpoint; give a transformers folder")
        return path
    return model


def open_out(args, path):
    """(folder of the results, its generations.jsonl open for writing); an older one moves to NAME.bak1, .bak2 .."""
    parts = os.path.normpath(path).split(os.sep)
    name = "-".join([p for p in parts if p != "checkpoints"][-2:]) if re.fullmatch(r"step_\d+", parts[-1]) else parts[-1]
    out = args.out or os.path.join("out", "eval", name)
    try:
        os.makedirs(out, exist_ok=True)
        for old in (os.path.join(out, name) for name in ("generations.jsonl", "results.csv", "summary.json")):
            if os.path.exists(old):
                free = next(k for k in itertools.count(1) if not os.path.exists(f"{old}.bak{k}"))
                os.replace(old, f"{old}.bak{free}")
        return out, open(os.path.join(out, "generations.jsonl"), "w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot write to this folder: {error.strerror}") from error


def load_sets(args, model, tokenizer):
    """{name: rows}, prompts that leave no room for --max-tokens dropped with a count."""
    longest, context = args.max_prompt_tokens, getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context:
        longest = min(longest or context, context - args.max_tokens)
        if longest < 1:
            raise UserError(f"--max-tokens {args.max_tokens} leaves no room for a prompt: the model's context is {context}")
    names = ("prompt_column", "answer_column", "system_prompt", "template_args", "prompt_format")
    options = {name: getattr(args, name) for name in names}
    sets = {}
    for spec in args.data:
        rows = data.load(spec, tokenizer, longest, **options)
        chosen = sets[set_name(spec)] = rows[: args.problems or None]
        print(f"{spec}: {len(chosen)} of {len(rows)} problems")
    return sets


def write_results(out, args, results):
    """results.csv and summary.json; NaN is an empty cell. The CSV holds no times: equal runs give equal files."""
    rows = [{k: "" if v != v else v for k, v in row.items() if k not in ("seconds", "tok_per_s")} for row in results]
    with replacing(os.path.join(out, "results.csv")) as f:
        table = csv.DictWriter(f, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    write_json(os.path.join(out, "summary.json"), {"flags": vars(args), "results": results})


def table(results, n, ks):
    """The results as text of at most WIDTH columns, in as many blocks of columns as that takes."""
    cells = []
    for row in results:
        c = {f"avg@{n}": f"{row['acc']:.3f}+-{row['se']:.3f}", f"maj@{n}": f"{row['maj']:.3f}+-{row['maj_se']:.3f}"}
        c |= {f"pass@{k}": f"{row[f'pass@{k}']:.3f}+-{row[f'pass@{k}_se']:.3f}" for k in ks}
        c |= {"problems": row["problems"], "excluded": row["excluded"], "tokens": f"{row['len_mean']:.1f}"}
        c |= {"cut off": f"{row['trunc_frac']:.1%}", "seconds": f"{row['seconds']:.1f}", "tok/s": f"{row['tok_per_s']:.0f}"}
        cells.append(c)
    spec = min(24, max(len(row["data"]) for row in results))
    heads = [f"{row['precision']:<10} {row['data'][-spec:]:<{spec}}" for row in results]
    names, fit, lines = list(cells[0]), (WIDTH - len(heads[0])) // 14, []
    for i in range(0, len(names), fit):
        block = names[i : i + fit]
        lines += ["", " " * len(heads[0]) + "".join(f"{name:>14}" for name in block)]
        lines += [head + "".join(f"{c[name]:>14}" for name in block) for head, c in zip(heads, cells, strict=True)]
    return "\n".join(lines)


def main():
    args = parse_flags()
    check_device(args.device)
    function = reward.load_function(args.reward) if args.reward else None
    path = find_model(args.model)
    quantiser = dict(backend=args.fp8_backend, power_of_two=args.pow2_scales, keep_bf16=args.keep_bf16)
    sets, results = None, []
    if args.vllm_memory and args.engine != "vllm":
        raise UserError(f"--vllm-memory has no effect with --engine {args.engine}; leave one of the two out")
    if args.vllm_compile and args.engine != "vllm":
        raise UserError(f"--vllm-compile has no effect with --engine {args.engine}; leave one of the two out")
    engine_args = {"memory_fraction": args.vllm_memory} if args.vllm_memory else {}
    engine_args |= {"compile": True} if args.vllm_compile else {}
    for recipe in args.precision:
        model = engine = None  # the previous precision's, freed before the next is loaded
        model, tokenizer, report = precision.load_model(path, recipe, args.device, **quantiser)
        print(f"{path}: {report if report.converted else recipe}")
        engine = make_engine(args.engine, model, tokenizer, recipe, args.rows, **quantiser, **engine_args)
        engine.sync(model.named_parameters())
        if sets is None:
            sets = load_sets(args, model, tokenizer)
            out, answers = open_out(args, path)
        part = []  # this precision's rows
        for name, rows in sets.items():
            sampling = (args.n, args.temperature, args.max_tokens, row_seed(args.seed, "eval", 0))
            summary, records = evaluate(engine, tokenizer, rows, *sampling, top_p=args.top_p, ks=args.k, function=function)
            answers.writelines(json.dumps({"data": name, "precision": recipe} | plain(record)) + "\n" for record in records)
            answers.flush()
            part.append({"precision": recipe, "data": name} | summary)
            write_results(out, args, results + part)
            print(f"{recipe} on {name}: avg@{args.n} {summary['acc']:.4f} +- {summary['se']:.4f} over {summary['problems']} "
                  f"problems, {summary['len_mean']:.1f} tokens an answer, {summary['trunc_frac']:.1%} cut off", flush=True)
        engine.close()
        results += part + ([{"precision": recipe, "data": "average"} | average(part)] if len(part) > 1 else [])
    write_results(out, args, results)
    answers.close()
    print(f"{table(results, args.n, args.k)}\n\n{out}/: generations.jsonl, results.csv, summary.json")


if __name__ == "__main__":
    run_main(main)
