"""What several test files train on: an untrained model, a few sums, a reward it sometimes meets; and a run's rows."""

import json

import tiny
from runlog import read_csv

TIMINGS = ("sec/", "tok_per_s/", "mem_gb")  # what two equal runs may differ in


def make_home(tmp_path_factory, **sums):
    """A folder with an untrained model of tied embeddings in `model`, and NAME.jsonl with sums a + (a + 1) over its range."""
    home = tmp_path_factory.mktemp("home")
    tokenizer = tiny.make_tokenizer()
    tiny.make_model(tokenizer).save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    for name, numbers in sums.items():
        rows = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in numbers]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def first_letter_even(texts, golds, truncated, limit=None, progress=False):
    """A reward an untrained model meets in 3 of 10 answers."""
    return [float(text[:1] in set("02468")) for text in texts]


def untimed_rows(out):
    """metrics.csv's columns as lists of floats, without times and memory."""
    columns = read_csv(str(out / "metrics.csv"))
    return {name: values for name, values in columns.items() if not name.startswith(TIMINGS)}
