r"""Data: (prompt, answer) pairs, made into token ids exactly once, and an endless shuffle that resumes where it stopped.

Where rows come from, `load(spec, tokenizer)`:

  arith:train   20,000 sums of two three-digit numbers, prompt `347+586=`, answer `933`; `arith:` is the same
  arith:test    1,000 held-out sums; a hash of the pair decides, so the two never overlap, whatever the seeds
  math.jsonl    one JSON object a line with `prompt` and `answer` (--prompt-column, --answer-column)

A row is {"prompt": text, "answer": text, "prompt_ids": list of int, "id": line or problem number, from 1}. Learner and sampler
both take `prompt_ids`; nobody tokenises the text again, so nobody adds a second BOS.

Prompt format:

  chat template   the prompt is the user's message: ids are those of `apply_chat_template(..., tokenize=True)`, nothing added
                  (a sum is then asked in words: `What is 347+586? Put the final answer in \boxed{}.`)
  no template     plain text; BOS in front if the tokenizer itself puts one there, and never a second one

What is dropped, each with a printed count: answers that the reward cannot grade, repeated prompts, prompts that are too long.

Run:    python data.py SPEC MODEL                prints the first rows and the lengths
Test:   python -m pytest tests/test_data.py
"""

import json
import sys
import zlib
from pathlib import Path

import torch
from jinja2 import TemplateError

from errors import UserError, run_main

ARITH_ROWS = {"train": 20_000, "test": 1_000}

# ------------------------------------------------------------------------------------------------------------------------
# sources: each gives (id, prompt, answer) triples


def arith_pairs(split, n, seed):
    """`n` distinct (a, b), both uniform in 100..999, all of one split; a smaller `n` gives the front of the same list."""
    assert split in ARITH_ROWS, f"split {split!r}: expected train or test"
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for code in torch.randperm(900 * 900, generator=generator).tolist():
        if len(pairs) == n:
            break
        a, b = 100 + code // 900, 100 + code % 900
        # the pair alone decides, not the seed; a+b and b+a are two problems
        if (zlib.crc32(f"{a}+{b}".encode()) % 10 == 0) == (split == "test"):
            pairs.append((a, b))
    assert len(pairs) == n, f"only {len(pairs)} {split} sums exist, {n} asked for"
    return pairs


def _arith(spec, in_words, seed):
    split = spec.removeprefix("arith:") or "train"
    if split not in ARITH_ROWS:
        raise UserError(f"--data or --eval-data {spec}: no such split; use arith:train or arith:test")
    form = "What is {}+{}? Put the final answer in \\boxed{{}}." if in_words else "{}+{}="
    pairs = arith_pairs(split, ARITH_ROWS[split], seed)
    return [(number, form.format(a, b), str(a + b)) for number, (a, b) in enumerate(pairs, 1)]


def _jsonl(path, prompt_column, answer_column):
    # Read with the json module rather than `datasets`: that one infers a schema for the whole file (an answer that is 4 in
    # one line and "x" in another fails) and reports a broken line without its number. Bytes, because text mode would
    # fail on bad UTF-8 before the line is known. Numbers stay as written: 0.50 is "0.50", and no digit is lost.
    if Path(path).is_dir():
        raise UserError(f"--data or --eval-data {path}: is a folder; name the .jsonl file in it")
    if not Path(path).is_file():
        raise UserError(f"--data or --eval-data {path}: no such file; give a .jsonl file, arith:train or arith:test")
    if not str(path).endswith(".jsonl"):
        raise UserError(f"--data or --eval-data {path}: unknown format; convert it to .jsonl, one JSON object a line")
    examples = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                fields = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)
            except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
                raise UserError(f"{where}: not valid JSON ({error}); mend or delete the line") from error
            if not isinstance(fields, dict):
                raise UserError(f"{where}: expected an object {{...}} with {prompt_column!r} and {answer_column!r}, not "
                                f"{type(fields).__name__}; write one object a line")
            prompt = _field(where, fields, prompt_column, "--prompt-column")
            if not prompt.strip():
                raise UserError(f"{where}: {prompt_column!r} is empty; fill it, or choose another with --prompt-column")
            examples.append((number, prompt, _field(where, fields, answer_column, "--answer-column").strip()))
    if not examples:
        raise UserError(f"{path}: the file has no rows; write one JSON object a line, or give --data another file")
    return examples


def _field(where, fields, column, flag):
    if column not in fields:
        raise UserError(f"{where}: no {column!r}, only {', '.join(map(repr, fields)) or 'an empty object'}; "
                        f"choose the column with {flag}")
    value = "" if fields[column] is None else fields[column]
    if not isinstance(value, str):
        raise UserError(f"{where}: {column!r} is a {type(value).__name__}, expected text or a number; "
                        f"convert it, or choose another column with {flag}")
    if any("\ud800" <= letter <= "\udfff" for letter in value):  # JSON allows it, no tokenizer takes it
        raise UserError(f"{where}: {column!r} holds half a character (\\ud800 to \\udfff alone); mend or delete the line")
    return value


# ------------------------------------------------------------------------------------------------------------------------
# rows


def load(spec, tokenizer, max_prompt_tokens=None, system_prompt=None, prompt_column="prompt", answer_column="answer",
         seed=0):
    """The rows of `spec`. `seed` picks the sums of arith: (leave it alone for evaluation: the same questions in every run)."""
    if spec.startswith("arith:"):
        examples = _arith(spec, bool(tokenizer.chat_template), seed)  # answers are integers by construction: no check
    else:
        examples = _drop_ungradable(spec, _jsonl(spec, prompt_column, answer_column), answer_column)
    examples = _drop_repeated(spec, examples)
    ids = prompt_ids(tokenizer, [prompt for _, prompt, _ in examples], system_prompt)
    rows = [{"prompt": prompt, "answer": answer, "prompt_ids": row_ids, "id": number}
            for (number, prompt, answer), row_ids in zip(examples, ids, strict=True)]
    for row in rows:
        if not row["prompt_ids"]:
            raise UserError(f"{spec} line {row['id']}: the tokenizer of --model makes no token of this prompt")
    if max_prompt_tokens is not None:
        kept = [row for row in rows if len(row["prompt_ids"]) <= max_prompt_tokens]
        if not kept:
            shortest = min(len(row["prompt_ids"]) for row in rows)
            raise UserError(f"{spec}: all {len(rows)} prompts are longer than {max_prompt_tokens} tokens (--max-prompt-tokens, "
                            f"or the model's context less --max-tokens); the shortest has {shortest}")
        _print_dropped(spec, len(rows) - len(kept), f"prompts longer than {max_prompt_tokens} tokens")
        rows = kept
    return rows


def prompt_ids(tokenizer, prompts, system_prompt=None):
    """Token ids of each prompt text: a list of lists of int."""
    if tokenizer.chat_template:
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        chats = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
        try:  # return_dict=False: since transformers 5 the default is a dictionary
            return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)
        except TemplateError as error:
            raise UserError(f"the chat template of --model refuses the messages ({error})"
                            + ("; leave out --system-prompt" if system_prompt else "")) from error
    if system_prompt:
        raise UserError("--system-prompt: the tokenizer of --model has no chat template; write it into the prompts")
    ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    # Not every tokenizer that names a BOS wants it in front (SmolLM2's is <|im_start|>): do what its own call does. Taking
    # that call's ids instead would also take an EOS, which some put at the end.
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("0")["input_ids"][:1] != [bos]:
        return ids
    return [row if row[:1] == [bos] else [bos, *row] for row in ids]


def _drop_ungradable(spec, examples, answer_column):
    from reward import gold_problem  # math-verify is needed for files only, not for sums

    problems = {answer: gold_problem(answer) for answer in {answer: None for _, _, answer in examples}}
    bad = [(number, problems[answer]) for number, _, answer in examples if problems[answer] is not None]
    first = "; ".join(f"line {number} {problem}" for number, problem in bad[:3])
    if len(bad) == len(examples):
        raise UserError(f"{spec}: none of the {len(bad)} answers can be graded ({first}); "
                        f"is {answer_column!r} the right --answer-column?")
    _print_dropped(spec, len(bad), f"answers that cannot be graded ({first})")
    return [example for example in examples if problems[example[2]] is None]


def _drop_repeated(spec, examples):
    first = {}  # prompt -> its first example
    for example in examples:
        first.setdefault(_key(example[1]), example)
    other = sum(first[_key(prompt)][2] != answer for _, prompt, answer in examples)
    _print_dropped(spec, len(examples) - len(first), "repeated prompts (the first is kept)"
                   + (f", {other} of them with a different answer" if other else ""))
    return list(first.values())


def _key(prompt):
    return prompt.strip()  # two prompts that differ by a trailing newline are the same question


def _print_dropped(spec, count, what):
    if count:
        print(f"{spec}: dropped {count} {what}")


def overlap(train_rows, eval_rows):
    """How many evaluation prompts also occur in training; anything above 0 makes the accuracy one of memory."""
    seen = {_key(row["prompt"]) for row in train_rows}
    return sum(_key(row["prompt"]) in seen for row in eval_rows)


# ------------------------------------------------------------------------------------------------------------------------
# order


class Shuffled:
    """`rows` for ever, every epoch in an order of its own that depends on (seed, epoch) alone.

    So the state is two numbers, and a resumed run draws exactly what the uninterrupted one would have drawn next.
    """

    def __init__(self, rows, seed):
        assert len(rows) > 0, "nothing to shuffle"
        self.rows, self.seed = rows, seed
        self.epoch, self.position = 0, 0
        self._order = self._permutation()

    def _permutation(self):
        # Hashed: torch's CPU generator keeps the low 32 bits of its seed, so (seed << 32) + epoch would lose the seed, and
        # with seed + epoch the second epoch of one run would be the first of the next seed's.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {self.epoch}".encode()))
        return torch.randperm(len(self.rows), generator=generator).tolist()

    def next(self, n):
        """The next `n` rows; may run over the end of an epoch, or of several."""
        drawn = []
        while len(drawn) < n:
            take = self._order[self.position:self.position + n - len(drawn)]
            drawn += [self.rows[i] for i in take]
            self.position += len(take)
            if self.position == len(self.rows):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation()
        return drawn

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "rows": len(self.rows)}

    def load_state_dict(self, state):
        if state["rows"] != len(self.rows):
            raise UserError(f"--resume: the checkpoint was trained on {state['rows']} rows, --data now gives "
                            f"{len(self.rows)}; resume with the same --data, --max-prompt-tokens and columns")
        if state["seed"] != self.seed:
            raise UserError(f"--resume: the checkpoint's data order has --seed {state['seed']}, this run --seed {self.seed}; "
                            f"resume with --seed {state['seed']}")
        assert 0 <= state["position"] < len(self.rows), f"position {state['position']} of {len(self.rows)} rows"
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._permutation()


def main():
    if len(sys.argv) != 3:
        raise UserError("usage: python data.py SPEC MODEL, for instance: python data.py arith:test out/smollm2")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
    rows = load(sys.argv[1], tokenizer)
    lengths = sorted(len(row["prompt_ids"]) for row in rows)
    print(f"{len(rows)} rows, prompt tokens min {lengths[0]}, median {lengths[len(rows) // 2]}, max {lengths[-1]}")
    for row in rows[:3]:
        print(f"{row['id']}: {tokenizer.decode(row['prompt_ids'])!r} -> {row['answer']!r}")


if __name__ == "__main__":
    run_main(main)
