r"""Data: (prompt, answer) pairs, made into token ids exactly once, and an endless shuffle that resumes where it stopped.

Where problems come from (`load(spec, tokenizer)`: arith:, rg:, presets, files, the hub) stands in sources.py.

A row is {"prompt": text, "answer": text, "prompt_ids": list of int, "id": line, row or problem number, from 1} and for rg:
"check": answer text or None -> score. Learner and sampler both take `prompt_ids`; nobody tokenises the text again, so nobody
adds a second BOS.

Prompt format:

  chat template   the prompt is the user's message, after --system-prompt, or a list of messages taken as it is (of which
                  --system-prompt replaces the system's): ids are those of `apply_chat_template(..., tokenize=True)` with
                  --template-args, nothing added (a sum is asked in words: `What is 347+586? Put the final answer in \boxed{}.`)
  no template     --prompt-format, by default `{prompt}`; BOS in front if the tokenizer itself puts one there, never a second

The hub's prompts are used as published: DAPO's ask for a last line `Answer: ...`, most do not ask for a form at all. The reward
reads \boxed{}, `####` and that line: ask for one of them in --system-prompt or --prompt-format.

What is dropped, each with a printed count: answers that the reward cannot grade, repeated prompts, prompts that are too long.

Run:    python data.py SPEC MODEL                prints the first rows and the lengths
Test:   python -m pytest tests/test_data.py
"""

import sys
import zlib

import torch
from jinja2 import TemplateError

from errors import UserError, run_main
from sources import read

# ------------------------------------------------------------------------------------------------------------------------
# rows


def load(spec, tokenizer, max_prompt_tokens=None, system_prompt=None, prompt_column=None, answer_column=None, seed=0,
         template_args=None, prompt_format=None, size=None):
    """The rows of `spec`; columns left at None are the preset's, or `prompt` and `answer`.

    `seed` picks the problems of arith: and rg: (leave it alone for evaluation: the same questions in every run).
    `size` is the number of problems of arith: and rg:, and an upper bound for the rest.
    """
    examples, unit, column, mark = read(spec, bool(tokenizer.chat_template), prompt_column, answer_column, seed, size)
    if column is not None:
        examples = _drop_ungradable(spec, unit, examples, column, mark)
    examples = _drop_repeated(spec, examples)[:size]
    chats = [example.messages or example.prompt for example in examples]
    ids = prompt_ids(tokenizer, chats, system_prompt, template_args, prompt_format)
    rows = [{"prompt": example.prompt, "answer": example.answer, "prompt_ids": row_ids, "id": example.id}
            | ({"check": example.check} if example.check else {}) for example, row_ids in zip(examples, ids, strict=True)]
    for row in rows:
        if not row["prompt_ids"]:
            raise UserError(f"{spec} {unit} {row['id']}: the tokenizer of --model makes no token of this prompt")
    if max_prompt_tokens is not None:
        kept = [row for row in rows if len(row["prompt_ids"]) <= max_prompt_tokens]
        if not kept:
            shortest = min(len(row["prompt_ids"]) for row in rows)
            raise UserError(f"{spec}: all {len(rows)} prompts are longer than {max_prompt_tokens} tokens (--max-prompt-tokens, "
                            f"or the model's context less --max-tokens); the shortest has {shortest}")
        _print_dropped(spec, len(rows) - len(kept), f"prompts longer than {max_prompt_tokens} tokens")
        rows = kept
    return rows


def prompt_ids(tokenizer, prompts, system_prompt=None, template_args=None, prompt_format=None):
    """Token ids of each prompt, a text or a list of messages: a list of lists of int."""
    if tokenizer.chat_template:
        if prompt_format not in (None, "", "{prompt}"):
            raise UserError("--prompt-format: --model has a chat template, which lays out the prompt; use --system-prompt")
        return _chat_ids(tokenizer, prompts, system_prompt, template_args or {})
    if system_prompt:
        raise UserError("--system-prompt: the tokenizer of --model has no chat template; write it into --prompt-format")
    if template_args:
        raise UserError("--template-args: the tokenizer of --model has no chat template; leave them out")
    prompt_format = prompt_format or "{prompt}"
    if "{prompt}" not in prompt_format:
        raise UserError(f"--prompt-format {prompt_format!r}: no {{prompt}} in it, so every prompt would be the same; add it")
    texts = [prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt if m["role"] != "system")
             for prompt in prompts]
    # replace, not format: both hold braces of LaTeX
    ids = tokenizer([prompt_format.replace("{prompt}", text) for text in texts], add_special_tokens=False)["input_ids"]
    # Not every tokenizer that names a BOS wants it in front (SmolLM2's is <|im_start|>): do what its own call does. Taking
    # that call's ids instead would also take an EOS, which some put at the end.
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("0")["input_ids"][:1] != [bos]:
        return ids
    return [row if row[:1] == [bos] else [bos, *row] for row in ids]


def _chat_ids(tokenizer, prompts, system_prompt, template_args):
    ours = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}  # a dictionary since transformers 5
    for name in template_args:  # a template ignores a name it does not know, so a typo would change nothing
        if name in ours or name not in str(tokenizer.chat_template):
            why = "is fixed" if name in ours else "does not occur in the chat template of --model"
            raise UserError(f"--template-args: {name} {why}; leave it out")
    chats = [prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] for prompt in prompts]
    if system_prompt:
        system = {"role": "system", "content": system_prompt}
        chats = [[system, *(message for message in chat if message["role"] != "system")] for chat in chats]
    try:
        return tokenizer.apply_chat_template(chats, **ours, **template_args)
    except TemplateError as error:
        raise UserError(f"the chat template of --model refuses the messages ({error})"
                        + ("; leave out --system-prompt" if system_prompt else "")) from error


def _drop_ungradable(spec, unit, examples, answer_column, mark):
    from reward import gold_problem  # math-verify is needed for files only, not for sums

    problems = {answer: gold_problem(answer) if mark in answer else f"has no {mark}"
                for answer in {answer: None for _, _, answer, *_ in examples}}
    bad = [(example.id, problems[example.answer]) for example in examples if problems[example.answer] is not None]
    first = "; ".join(f"{unit} {number} {problem}" for number, problem in bad[:3])
    if len(bad) == len(examples):
        raise UserError(f"{spec}: none of the {len(bad)} answers can be graded ({first}); "
                        f"is {answer_column!r} the right --answer-column?")
    _print_dropped(spec, len(bad), f"answers that cannot be graded ({first})")
    examples = [example for example in examples if problems[example.answer] is None]
    if mark:  # 1,234 below the solution is 1234
        examples = [e._replace(answer=e.answer.rpartition(mark)[2].strip().replace(",", "")) for e in examples]
    return examples


def _drop_repeated(spec, examples):
    first = {}  # prompt -> its first example
    for example in examples:
        first.setdefault(_key(example.prompt), example)
    other = sum(first[_key(example.prompt)].answer != example.answer for example in examples)
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

    try:
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
    except (OSError, ValueError) as error:
        raise UserError(f"{sys.argv[2]}: no tokenizer there: {str(error).splitlines()[0]}") from error
    rows = load(sys.argv[1], tokenizer)
    lengths = sorted(len(row["prompt_ids"]) for row in rows)
    print(f"{len(rows)} rows, prompt tokens min {lengths[0]}, median {lengths[len(rows) // 2]}, max {lengths[-1]}")
    for row in rows[:3]:
        print(f"{row['id']}: {tokenizer.decode(row['prompt_ids'])!r} -> {row['answer']!r}")


if __name__ == "__main__":
    run_main(main)
