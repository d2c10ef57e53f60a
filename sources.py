r"""Where problems come from: `read(spec, ...)` gives (id, prompt, answer) examples for data.py to turn into rows.

  arith:train   20,000 sums of two three-digit numbers, prompt `347+586=`, answer `933`; `arith:` is the same
  arith:test    1,000 held-out sums; a hash of the pair decides, so the two never overlap, whatever the seeds
  rg:NAME[:test][,key=value...]    2,000 problems of a reasoning-gym task, graded by the task (`check`). Problem i of seed s
                is drawn from s + i; rg:NAME:test has its own seed, and its problems are dropped from rg:NAME
  NAME[:SPLIT]  a data set of the table PRESETS, from the hub: gsm8k, gsm8k:test, aime24
  NAME[:SPLIT]=PATH                the same columns from a file (.parquet, .jsonl, .json) or a folder, without the hub
  OWNER/NAME[:SPLIT]               any other hub data set, with --prompt-column and --answer-column; the split is else `train`
  rows.parquet, rows.jsonl         files with `prompt` and `answer`, or the columns of the two flags

A column may be nested (`reward_model.ground_truth`), a prompt may be a list of chat messages. The hub is asked for its data
sets only: files and folders never touch the network.
"""

import dataclasses
import functools
import json
import random
import re
import sys
import zlib
from collections import namedtuple
from difflib import get_close_matches
from pathlib import Path

import numpy
import torch

from errors import UserError

ARITH_ROWS = {"train": 20_000, "test": 1_000}
RG_ROWS = 2_000
READERS = {".parquet": "from_parquet", ".json": "from_json", ".jsonl": "from_json"}
RG_TEST_SEED = 2**31  # training seeds are below; problem i of seed s is drawn from s + i, and numpy takes seeds below 2**32
BOXED = "Put the final answer in \\boxed{}."

# form: how the answer column holds the answer. "####": after that mark, below the solution; "aime": an integer from 0 to 999,
# and 30 problems a year. No hub could be reached when this was written: ids, columns and splits are those that public code
# loads. A revision is given where several unrelated projects pin the same one; None, the newest, where none was found.
Preset = namedtuple("Preset", "id config split prompt answer form revision", defaults=(None, None))
PRESETS = {
    "gsm8k": Preset("openai/gsm8k", "main", "train", "question", "answer", "####", "740312add88f781978c0658806c59bc2815b9866"),
    "deepscaler": Preset("agentica-org/DeepScaleR-Preview-Dataset", None, "train", "problem", "answer", None,
                         "b6ae8c60f5c1f2b594e2140b91c49c9ad0949e29"),
    "dapo-math-17k": Preset("BytedTsinghua-SIA/DAPO-Math-17k", None, "train", "prompt", "reward_model.ground_truth", None,
                            "65877096c24ffa7abc4e4fa5edb95cf3413a5674"),  # each prompt about 100 times
    "math-500": Preset("HuggingFaceH4/MATH-500", None, "test", "problem", "answer", None,
                       "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"),
    "aime24": Preset("HuggingFaceH4/aime_2024", None, "train", "problem", "answer", "aime",
                     "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"),
    "aime25": Preset("MathArena/aime_2025", None, "train", "problem", "answer", "aime"),
    "amc23": Preset("math-ai/amc23", None, "test", "question", "answer", None, "80815d37005feb82cd7f8fbc6901d5d3eff43057"),
    "amc24": Preset("rawsh/2024_AMC12", None, "train", "problem", "answer"),
    "minerva": Preset("math-ai/minervamath", None, "test", "question", "answer"),
    "olympiadbench": Preset("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", "question", "final_answer"),  # a list
    "gaokao": Preset("MARIO-Math-Reasoning/Gaokao2023-Math-En", None, "train", "question", "answer"),
}

# ------------------------------------------------------------------------------------------------------------------------
# sources: each gives a list of examples

# messages: the chat where it is more than the prompt as the user's one message; check: the task's own grading
Example = namedtuple("Example", "id prompt answer messages check", defaults=(None, None))


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


def _arith(spec, in_words, seed, size):
    split = spec.removeprefix("arith:") or "train"
    if split not in ARITH_ROWS:
        raise _refusal(spec, "no such split; use arith:train or arith:test")
    form = "What is {}+{}? " + BOXED.replace("{}", "{{}}") if in_words else "{}+{}="
    pairs = arith_pairs(split, size or ARITH_ROWS[split], seed)
    return [Example(number, form.format(a, b), str(a + b)) for number, (a, b) in enumerate(pairs, 1)]


def _reasoning_gym(spec, seed, size):
    import reasoning_gym  # here: it takes a second, and only these rows need it
    from reasoning_gym.factory import DATASETS

    from reward import check_task

    head, *options = spec.removeprefix("rg:").split(",")
    name, _, split = head.partition(":")
    if name not in DATASETS:
        raise _refusal(spec, f"no task {name!r}{_similar(name, DATASETS) or '; it has ' + ', '.join(DATASETS)}")
    if split not in ("", "train", "test"):
        raise _refusal(spec, f"no split {split!r}; use rg:{name} or rg:{name}:test, then ,key=value")
    settings = {"size": size or RG_ROWS}
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name != "seed"]
    for key, _, value in (option.partition("=") for option in options):
        if key not in known:
            raise _refusal(spec, f"the task has no option {key!r}{_similar(key, known) or '; it has ' + ', '.join(known)}")
        try:
            settings[key] = json.loads(value.lower())  # 3, 0.5, true or True
        except ValueError:
            settings[key] = value
    if type(settings["size"]) is not int or settings["size"] < 1:
        raise _refusal(spec, f"size={settings['size']} is not a number of problems; give size={RG_ROWS}")

    def problems(seed):
        states = random.getstate(), numpy.random.get_state()
        random.seed(seed)  # a task or two draw from the global generators
        try:
            task = reasoning_gym.create_dataset(name, seed=seed, **settings)
        except (AssertionError, TypeError, ValueError) as error:  # the task's own check of its options
            raise _refusal(spec, f"the task refuses these options ({error}); change them") from error
        # the sentence after the question is not the task's: it says where the answer is looked for
        examples = [Example(number, f"{entry['question'].rstrip()}\n\n{BOXED}", str(entry["answer"] or ""),
                            check=functools.partial(check_task, name, settings, entry)) for number, entry in enumerate(task, 1)]
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        return examples

    test = problems(RG_TEST_SEED)
    if split == "test":
        return test
    train, held_out = problems(seed % RG_TEST_SEED), {example.prompt.strip() for example in test}
    kept = [example for example in train if example.prompt.strip() not in held_out]
    if not kept:
        raise _refusal(spec, f"rg:{name}:test holds out all {len(train)} problems, as the task has so few; lower size=, or "
                             "widen the task with ,key=value")
    if len(kept) < len(train):
        print(f"{spec}: dropped {len(train) - len(kept)} problems that rg:{name}:test holds out")
    return kept


def _table(spec):
    """A preset, another data set of the hub, or a file, as a table of `datasets`."""
    import datasets  # here: it takes a second, and neither sums nor .jsonl files need it
    import httpx

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    head, equals, path = spec.partition("=")
    name, _, split = head.partition(":")
    preset = PRESETS.get(name)
    path = Path(path if preset and equals else spec)
    if preset and not equals:
        hub, fix = (preset.id, preset.config), f"check NAME:SPLIT; without a network give a copy, {name}=PATH"
        call = functools.partial(datasets.load_dataset, *hub, split=split or preset.split, revision=preset.revision)
    elif path.is_file() and path.suffix in READERS:
        # not load_dataset("parquet", ...), which reports each use over the network
        fix, call = "mend or convert the file", functools.partial(getattr(datasets.Dataset, READERS[path.suffix]), str(path))
    elif path.is_dir() and preset and not spec.endswith("="):
        fix, call = "name one file in the folder", functools.partial(_folder, datasets, str(path.resolve()), preset.config)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not (equals or Path(name).parent.exists() or path.suffix in READERS):
        fix = "check OWNER/NAME:SPLIT; without a network give a .parquet or .jsonl file"
        call = functools.partial(datasets.load_dataset, name, split=split or "train")
    elif path.exists() and not spec.endswith("="):
        names = ", ".join(PRESETS)
        raise _refusal(spec, f"is a folder; name the file in it, or give NAME={path} with one of {names}" if path.is_dir() else
                             "unknown format; convert it to .jsonl, one JSON object a line")
    else:
        raise _refusal(spec, f"no such file or data set{_similar(name, PRESETS)}; give a .jsonl or .parquet file, arith:train, "
                             f"rg:TASK, OWNER/NAME of the hub, or one of {', '.join(PRESETS)}")
    try:
        table = call()
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, httpx.HTTPError) as error:
        # "An error occurred while generating the dataset" hides its cause
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise _refusal(spec, f"cannot be loaded ({' '.join(str(reason).split())}); {fix}") from error
    if isinstance(table, dict):  # the splits of a folder
        split = split or (preset.split if len(table) > 1 else next(iter(table)))
        if split not in table:
            raise _refusal(spec, f"no split {split!r} in the folder, only {', '.join(table)}; give NAME:SPLIT=PATH")
        table = table[split]
    return table


def _folder(datasets, path, config):
    # a clone of the hub's repository has the hub's configs; an absolute path is never taken for a name of the hub
    return datasets.load_dataset(path, config if config in datasets.get_dataset_config_names(path) else None)


def _similar(name, names):
    close = get_close_matches(name, names, 3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _refusal(spec, text):
    return UserError(f"--data or --eval-data {spec}: {text}")


def _examples(spec, prompt_column, answer_column):
    table = _table(spec)
    columns, names = {prompt_column: "--prompt-column", answer_column: "--answer-column"}, table.column_names
    for column, flag in columns.items():
        if column not in names and column.split(".")[0] not in names:
            raise _no_column(spec, column, names, flag)
    needed = {column if column in names else column.split(".")[0] for column in columns}
    examples = []
    for batch in table.select_columns(sorted(needed)).iter(1000):  # row by row is several times slower
        for values in zip(*batch.values(), strict=True):
            fields, number = dict(zip(batch, values, strict=True)), len(examples) + 1
            examples.append(_example(number, f"{spec} row {number}", fields, prompt_column, answer_column))
    return examples


def _jsonl(path, prompt_column, answer_column):
    # Read with the json module rather than `datasets`: that one infers a schema for the whole file (an answer that is 4 in
    # one line and "x" in another fails) and reports a broken line without its number. Bytes, because text mode would
    # fail on bad UTF-8 before the line is known. Numbers stay as written: 0.50 is "0.50", and no digit is lost.
    if not Path(path).is_file():
        raise _refusal(path, ("is a folder" if Path(path).is_dir() else "no such file") + "; give a .jsonl or .parquet file")
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
            examples.append(_example(number, where, fields, prompt_column, answer_column))
    if not examples:
        raise UserError(f"{path}: the file has no rows; write one JSON object a line, or give --data another file")
    return examples


def _example(number, where, fields, prompt_column, answer_column):
    prompt, messages = _field(where, fields, prompt_column, "--prompt-column"), None
    if isinstance(prompt, list):
        sound = all(isinstance(m, dict) and {type(m.get(key)) for key in ("role", "content")} == {str} for m in prompt)
        if not prompt or not sound or prompt[-1]["role"] != "user":
            raise UserError(f"{where}: {prompt_column!r} is a list, but not of messages with role and content, the last one "
                            "the user's; mend it, or choose another with --prompt-column")
        # other keys are mostly None, filled in by the file format
        messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
        prompt = "\n\n".join(message["content"] for message in messages if message["role"] != "system")
        messages = messages if len(messages) > 1 else None
    prompt = _text(where, prompt, prompt_column, "--prompt-column")
    if not prompt.strip():
        raise UserError(f"{where}: {prompt_column!r} is empty; fill it, or choose another with --prompt-column")
    answer = _field(where, fields, answer_column, "--answer-column")
    if isinstance(answer, list):  # OlympiadBench: mostly of one
        answer = ", ".join(_text(where, part, answer_column, "--answer-column") for part in answer)
    answer = _text(where, answer, answer_column, "--answer-column").strip()
    # interned: a data set that holds every prompt a hundred times then costs the memory of one
    return Example(number, sys.intern(prompt), sys.intern(answer), messages)


def _field(where, fields, column, flag):
    value = fields
    for key in [column] if column in fields else column.split("."):
        if not isinstance(value, dict) or key not in value:
            raise _no_column(where, column, fields, flag)
        value = value[key]
    return value


def _no_column(where, column, names, flag):
    return UserError(f"{where}: no {column!r}, only {', '.join(map(repr, names)) or 'an empty object'}; "
                     f"choose the column with {flag}")


def _text(where, value, column, flag):
    if type(value) in (int, float):
        return str(int(value) if value == value // 1 else value)  # 27.0 is 27
    value = "" if value is None else value
    if not isinstance(value, str):
        raise UserError(f"{where}: {column!r} is a {type(value).__name__}, expected text or a number; "
                        f"convert it, or choose another column with {flag}")
    if re.search("[\ud800-\udfff]", value):  # JSON allows it, no tokenizer takes it
        raise UserError(f"{where}: {column!r} holds half a character (\\ud800 to \\udfff alone); mend or delete the line")
    return value


def _check_aime(spec, examples):
    for example in examples:
        if not re.fullmatch("[0-9]{1,3}", example.answer):
            raise UserError(f"{spec} row {example.id}: the answer is {example.answer!r}, an AIME answer is a whole number from "
                            "0 to 999; mend it, or choose another column with --answer-column")
    count = len({example.prompt.strip() for example in examples})
    if "=" not in spec and count != 30:
        raise _refusal(spec, f"the hub's copy has {count} problems, an AIME year has 30; give a checked one, "
                             f"{spec.partition(':')[0]}=PATH")


def read(spec, in_words, prompt_column=None, answer_column=None, seed=0, size=None):
    """(examples, unit, answer column, mark): unit is "line" or "row", for messages; mark is what must stand before an answer
    ("####"), or "". The answer column is None where answers need no check (sums and reasoning-gym problems)."""
    if spec.startswith("arith:"):
        return _arith(spec, in_words, seed, size), "row", None, ""
    if spec.startswith("rg:"):
        return _reasoning_gym(spec, seed, size), "row", None, ""
    preset = PRESETS.get(re.split("[:=]", spec)[0])
    prompt_column = prompt_column or (preset.prompt if preset else "prompt")
    answer_column = answer_column or (preset.answer if preset else "answer")
    unit = "line" if spec.endswith(".jsonl") and not preset else "row"
    examples = (_jsonl if unit == "line" else _examples)(spec, prompt_column, answer_column)
    if preset and preset.form == "aime":
        _check_aime(spec, examples)
    mark = "####" if preset and preset.form == "####" and answer_column == preset.answer else ""
    return examples, unit, answer_column, mark
