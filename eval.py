"""Evaluation: sampled accuracy on held-out problems with its standard error, in any precision.

Each problem is answered n times; a_i is the share of right answers to problem i (its avg@n).

    acc = mean_i a_i            se = std_i(a_i) / sqrt(problems)      over problems: answers to one problem are not independent

Samples whose gold answer cannot be graded (NaN) are left out. The same seed gives the same table.

    python eval.py --model out/tiny --data arith:test --precision fp8-row --n 4 --problems 200
    python eval.py --model out/demo/checkpoints/step_000040 --precision bf16 --save out/answers.jsonl
"""

import json

import torch

import data
import precision
import reward
import tiny
from errors import Flags, UserError, number, run_main
from rollout import make_engine


def evaluate(engine, tokenizer, rows, n=4, temperature=1.0, max_tokens=64, seed=0, progress=True):
    """Sample n answers per row and grade them: (summary, records).

    summary: acc, se, problems, n, len_mean (tokens), trunc_frac; records: one dict per answer, in order, for JSONL.
    """
    completions = engine.generate([row["prompt_ids"] for row in rows], n, temperature, max_tokens, seed, progress=progress)
    texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
    golds = [row["answer"] for row in rows for _ in range(n)]
    truncated = [c.finish_reason == "length" for c in completions]
    scores = torch.tensor(reward.grade_batch(texts, golds, truncated, progress=progress)).view(len(rows), n)
    per_problem = scores.nanmean(1)
    per_problem = per_problem[~per_problem.isnan()]
    if not len(per_problem):
        raise UserError("evaluation: no problem has a gold answer that can be graded")
    lengths = torch.tensor([float(len(c.token_ids)) for c in completions])
    summary = {
        "acc": per_problem.mean().item(),
        "se": per_problem.std().item() / len(per_problem) ** 0.5 if len(per_problem) > 1 else float("nan"),
        "problems": len(per_problem),
        "n": n,
        "len_mean": lengths.mean().item(),
        "trunc_frac": sum(truncated) / len(truncated),
    }
    records = [
        {"id": rows[i // n]["id"], "prompt": rows[i // n]["prompt"], "completion": text, "gold": gold, "reward": score,
         "finish_reason": c.finish_reason}
        for i, (c, text, gold, score) in enumerate(zip(completions, texts, golds, scores.flatten().tolist(), strict=True))
    ]  # fmt: skip
    return summary, records


def main():
    parser = Flags(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="folder, checkpoint or hub name; `tiny` makes the embedded model")
    parser.add_argument("--data", default="arith:test", help="arith:test or a JSONL file")
    parser.add_argument("--precision", default="bf16", help=", ".join(precision.RECIPES))
    parser.add_argument("--fp8-backend", choices=["emulate", "scaled_mm"], help="default: scaled_mm on a GPU, emulate on a CPU")
    parser.add_argument("--problems", type=number(int, 0), default=200, help="first so many problems; 0 = all")
    parser.add_argument("--n", type=number(int, 1), default=4, help="answers per problem")
    parser.add_argument("--temperature", type=number(float, 0), default=1.0, help="0 = greedy")
    parser.add_argument("--max-tokens", type=number(int, 1), default=64, help="tokens per answer")
    parser.add_argument("--seed", type=number(int, 0), default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", default="", help="write every answer to this JSONL file")
    args = parser.parse_args()
    path = tiny.prepare() if args.model == "tiny" else args.model
    model, tokenizer, report = precision.load_model(path, args.precision, args.device, backend=args.fp8_backend)
    rows = data.load(args.data, tokenizer)[: args.problems or None]
    engine = make_engine("hf", model, tokenizer, args.precision)
    summary, records = evaluate(engine, tokenizer, rows, args.n, args.temperature, args.max_tokens, args.seed)
    if args.save:
        try:
            with open(args.save, "w", encoding="utf-8") as f:
                f.writelines(json.dumps(record) + "\n" for record in records)
        except OSError as error:
            raise UserError(f"--save {args.save}: {error.strerror}") from error
    print(f"{args.model} on {args.data}, {report.recipe}, temperature {args.temperature}, seed {args.seed}")
    print(f"avg@{args.n} {summary['acc']:.4f} +- {summary['se']:.4f} over {summary['problems']} problems, "
          f"{summary['len_mean']:.1f} tokens an answer, {summary['trunc_frac']:.1%} cut off")


if __name__ == "__main__":
    run_main(main)
