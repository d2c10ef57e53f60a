"""Data: ids equal the chat template's, BOS at most once, every broken line is named, a resumed shuffle continues exactly.

No hub is reached: presets read small files in the published schemas, and hub names are answered from a local clone.

python -m pytest tests/test_data.py
"""

import json
import random
import string

import datasets
import huggingface_hub.constants
import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data import Shuffled, load, overlap, prompt_ids
from errors import UserError
from reward import grade
from sources import PRESETS, arith_pairs

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m.role }}|{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant|{% endif %}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"


@pytest.fixture(autouse=True)
def alone(tmp_path_factory, monkeypatch):
    """No network, and no cache but an empty one."""
    for where in datasets.config, huggingface_hub.constants:
        monkeypatch.setattr(where, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def characters(template=None, adds_bos=False):
    """One token per character, <s> is the BOS."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *string.printable])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if adds_bos:  # and an EOS, as some do: it must not end up in a prompt
        special = [("<s>", 1), ("</s>", 2)]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                        unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def write(tmp_path, *lines):
    """Lines as given, dictionaries as JSON."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def refusal(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        load(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------------------------------------------
# sums


def test_sums_as_text():
    rows = load("arith:train", characters())
    assert len(rows) == 20_000 and rows == load("arith:", characters())
    assert [row["id"] for row in rows] == list(range(1, 20_001))
    assert len({row["prompt"] for row in rows}) == 20_000
    vocabulary = characters().get_vocab()
    for row in rows:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert len(a) == len(b) == 3 and row["answer"] == str(int(a) + int(b))
        assert row["prompt_ids"] == [vocabulary[letter] for letter in row["prompt"]]


def test_sums_through_a_chat_template():
    tokenizer = characters(TEMPLATE)
    a, b = arith_pairs("test", 1, 0)[0]
    row = load("arith:test", tokenizer)[0]
    assert row["prompt"] == f"What is {a}+{b}? Put the final answer in \\boxed{{}}." and row["answer"] == str(a + b)
    assert tokenizer.decode(row["prompt_ids"]).replace(" ", "").startswith("<s>user|What")


def test_splits_never_overlap():
    every_test_sum = set(arith_pairs("test", 80_857, 0))
    with pytest.raises(AssertionError, match="only 80857"):
        arith_pairs("test", 80_858, 0)
    for seed in range(5):
        assert not every_test_sum & set(arith_pairs("train", 20_000, seed))
        assert every_test_sum >= set(arith_pairs("test", 1_000, seed))
    assert overlap(load("arith:train", characters()), load("arith:test", characters())) == 0


def test_operands_are_uniform_and_follow_the_seed():
    pairs = arith_pairs("train", 20_000, 3)
    assert pairs[:100] == arith_pairs("train", 100, 3) != arith_pairs("train", 100, 4)
    for operand in map(torch.tensor, zip(*pairs, strict=True)):
        assert operand.min() >= 100 and operand.max() <= 999
        # mean of 20,000 draws: 549.5, standard error 260 / sqrt(20000) = 1.8
        assert abs(operand.double().mean() - 549.5) < 9 and operand.unique().numel() == 900


# ------------------------------------------------------------------------------------------------------------------------
# token ids


def test_ids_are_the_chat_templates(tmp_path):
    # this tokenizer adds a BOS of its own and the template writes one: the double BOS of text that is tokenised again
    tokenizer = characters(TEMPLATE, adds_bos=True)
    path = write(tmp_path, {"prompt": "1+1", "answer": "2"}, {"prompt": "Say\n3", "answer": 3})
    for system_prompt in None, "Be brief.":
        for row in load(path, tokenizer, system_prompt=system_prompt):
            chat = [{"role": "system", "content": system_prompt}] if system_prompt else []
            chat.append({"role": "user", "content": row["prompt"]})
            expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
            assert row["prompt_ids"] == expected
            assert all(type(token) is int for token in row["prompt_ids"])
            assert row["prompt_ids"][0] == 1 and row["prompt_ids"].count(1) == 1
            assert tokenizer.convert_ids_to_tokens(row["prompt_ids"][-10:]) == list("assistant|")


@pytest.mark.parametrize("prompt, adds_bos, expected", [
    ("1+1", False, ["1", "+", "1"]),  # names a BOS, puts none in front
    ("1+1", True, ["<s>", "1", "+", "1"]),
    ("<s>1+1", True, ["<s>", "1", "+", "1"]),
    ("<s>1+1", False, ["<s>", "1", "+", "1"]),
])
def test_plain_text_has_one_bos_at_most(tmp_path, prompt, adds_bos, expected):
    tokenizer = characters(adds_bos=adds_bos)
    row = load(write(tmp_path, {"prompt": prompt, "answer": "2"}), tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(row["prompt_ids"]) == expected


def test_system_prompt_needs_a_template_that_takes_it(tmp_path):
    path = write(tmp_path, {"prompt": "1+1", "answer": "2"})
    assert "--system-prompt" in refusal(path, characters(), system_prompt="Be brief.")
    message = refusal(path, characters(NO_SYSTEM), system_prompt="Be brief.")
    assert "--system-prompt" in message and "no system role" in message
    assert len(load(path, characters(NO_SYSTEM))) == 1


def test_template_args(tmp_path):
    path, tokenizer = write(tmp_path, {"prompt": "1+1", "answer": "2"}), characters(THINKING)
    texts = ["".join(tokenizer.convert_ids_to_tokens(load(path, tokenizer, template_args=arguments)[0]["prompt_ids"]))
             for arguments in (None, {"enable_thinking": True}, {"enable_thinking": False})]
    assert texts == ["<s>user|1+1\nassistant|"] * 2 + ["<s>user|1+1\nassistant|no thoughts"]
    for arguments, words in [({"enable_thinkin": False, "x": 1}, "does not occur"), ({"tokenize": False}, "is fixed")]:
        message = refusal(path, tokenizer, template_args=arguments)
        assert f"--template-args: {next(iter(arguments))} {words}" in message if words == "is fixed" else words in message
    message = refusal(path, characters(), template_args={"enable_thinking": False})
    assert "--template-args" in message and "no chat template" in message


def test_prompt_format(tmp_path):
    path, tokenizer = write(tmp_path, {"prompt": "1{+}1", "answer": "2"}), characters(adds_bos=True)
    row = load(path, tokenizer, prompt_format="Q: {prompt}\nUse \\boxed{}.\nA:")[0]
    assert "".join(tokenizer.convert_ids_to_tokens(row["prompt_ids"])) == "<s>Q: 1{+}1\nUse \\boxed{}.\nA:"
    assert row["prompt"] == "1{+}1"  # the question itself: what `overlap` compares
    with_bos, plain = (load(path, tokenizer, prompt_format=form)[0]["prompt_ids"] for form in ("<s>{prompt}", "{prompt}"))
    assert with_bos == plain and with_bos.count(1) == 1
    assert "no {prompt} in it" in refusal(path, tokenizer, prompt_format="Q: {}")
    assert "--prompt-format" in refusal(path, characters(TEMPLATE), prompt_format="Q: {prompt}")
    assert load(path, characters(TEMPLATE), prompt_format="{prompt}") == load(path, characters(TEMPLATE))


def test_prompt_ids_take_texts_and_messages():
    tokenizer = characters(TEMPLATE)
    assert prompt_ids(tokenizer, ["ab"]) == prompt_ids(tokenizer, [[{"role": "user", "content": "ab"}]])
    assert prompt_ids(characters(), [[{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}]]) == \
        prompt_ids(characters(), ["ab"])


# ------------------------------------------------------------------------------------------------------------------------
# files


def test_rows_of_a_file(tmp_path):
    path = write(tmp_path, {"prompt": "a", "answer": 4}, "", "   ", {"prompt": " b\n", "answer": " 7 ", "more": [1]},
                 '{"prompt": "c\u2028d", "answer": -0.50}', '{"prompt": "e", "answer": 12345678901234567890.5}')
    rows = load(path, characters())
    assert [(row["id"], row["prompt"], row["answer"]) for row in rows] == [
        (1, "a", "4"), (4, " b\n", "7"), (5, "c\u2028d", "-0.50"), (6, "e", "12345678901234567890.5")]


def test_other_columns(tmp_path):
    path = write(tmp_path, {"problem": "a", "solution": "4", "prompt": "x", "answer": "9"})
    row = load(path, characters(), prompt_column="problem", answer_column="solution")[0]
    assert (row["prompt"], row["answer"]) == ("a", "4")


@pytest.mark.parametrize("line, words", [
    ('{"prompt": "a", "answer": ', ["not valid JSON"]),
    ('["a", "4"]', ["list", "'prompt'", "'answer'"]),
    ('{"problem": "a", "answer": "4"}', ["no 'prompt'", "'problem', 'answer'", "--prompt-column"]),
    ('{"prompt": "a", "solution": "4"}', ["no 'answer'", "'prompt', 'solution'", "--answer-column"]),
    ('{}', ["no 'prompt'", "empty object"]),
    ('{"prompt": [{"role": "user"}], "answer": "4"}', ["'prompt' is a list", "--prompt-column"]),
    ('{"prompt": "a", "answer": true}', ["'answer' is a bool", "--answer-column"]),
    ('{"prompt": " ", "answer": "4"}', ["'prompt' is empty"]),
    ('{"prompt": "\\ud83d", "answer": "4"}', ["'prompt'", "half a character"]),
])
def test_broken_lines_are_named(tmp_path, line, words):
    path = write(tmp_path, {"prompt": "good", "answer": "1"}, "", line)
    message = refusal(path, characters())
    assert f"{path} line 3" in message
    for word in words:
        assert word in message


def test_bad_utf8_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n{"prompt": "\xff", "answer": "1"}\n')
    assert f"{path} line 2" in refusal(str(path), characters())


def test_bad_specs(tmp_path):
    (tmp_path / "table.csv").write_text("prompt,answer\n")
    for spec, words in [(str(tmp_path), "folder"), (str(tmp_path / "none.jsonl"), "no such file"),
                        (write(tmp_path, "", ""), "no rows"), (str(tmp_path / "table.csv"), "unknown format"),
                        ("arith:validation", "arith:train")]:
        message = refusal(spec, characters())
        assert words in message and spec in message and "--data" in message


# ------------------------------------------------------------------------------------------------------------------------
# data sets

DAPO = [{"data_source": "math_dapo", "prompt": [{"content": content, "role": "user"}], "ability": "MATH",
         "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9"}}
        for content, answer in [("Find $a+b$.", "34"), ("How many?", "540")] * 3]
AIME24 = [{"id": 60, "problem": "Find the time.", "solution": "...\\boxed{204}", "answer": "204", "year": "2024"},
          {"id": 61, "problem": "Find the remainder.", "solution": "$\\boxed{033}$", "answer": "033", "year": "2024"}]
PUBLISHED = {  # preset: rows in the published schema, (prompt, answer) of each
    "gsm8k": ([{"question": "How many clips?", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\n#### 72"},
               {"question": "How much?", "answer": "It is $1,200 more.\n#### 1,234"},
               {"question": "What is left?", "answer": "Less than nothing.\n#### -5"}],
              [("How many clips?", "72"), ("How much?", "1234"), ("What is left?", "-5")]),
    "math-500": ([{"problem": "Convert $(0,3)$.", "solution": "We have...", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
                   "subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"}],
                 [("Convert $(0,3)$.", "\\left( 3, \\frac{\\pi}{2} \\right)")]),
    "aime24": (AIME24, [("Find the time.", "204"), ("Find the remainder.", "033")]),
    "aime25": ([{"problem_idx": 1, "problem": "Find the sum of all bases.", "answer": 70, "problem_type": ["Number Theory"]}],
               [("Find the sum of all bases.", "70")]),
    "dapo-math-17k": (DAPO, [("Find $a+b$.", "34"), ("How many?", "540")]),
    "olympiadbench": ([{"id": 1, "question": "Find $x$.", "final_answer": ["$2$"], "is_multiple_answer": False},
                       {"id": 2, "question": "Find both.", "final_answer": ["1", "3"], "is_multiple_answer": True}],
                      [("Find $x$.", "$2$"), ("Find both.", "1, 3")]),
    "amc23": ([{"id": 0, "question": "When do they meet?", "answer": 27.0, "url": "x"}], [("When do they meet?", "27")]),
}


def store(rows, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_schemas(name, ending, tmp_path, monkeypatch, capfd):
    rows, expected = PUBLISHED[name]
    path = store(rows, tmp_path / f"rows.{ending}")
    capfd.readouterr()
    monkeypatch.setattr("socket.socket", None)  # whoever opens a connection fails
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    loaded = load(f"{name}={path}", characters(TEMPLATE))
    assert [(row["prompt"], row["answer"]) for row in loaded] == expected
    assert [row["id"] for row in loaded] == list(range(1, len(expected) + 1))
    said, bars = capfd.readouterr()
    assert bars == ""
    repeated = f"{name}={path}: dropped 4 repeated prompts (the first is kept)\n"
    assert said == (repeated if name == "dapo-math-17k" else "")


def test_gold_of_a_preset_is_gradable(tmp_path):
    row = load("gsm8k=" + store(PUBLISHED["gsm8k"][0], tmp_path / "a.parquet"), characters())[1]
    assert grade("so \\boxed{1234}", row["answer"]) == 1 and grade("#### 1.234", row["answer"]) == 0


def test_gsm8k_without_its_mark_is_reported(tmp_path, capsys):
    rows = [{"question": "a", "answer": "It is 5."}, {"question": "b", "answer": "#### 6"}, {"question": "c", "answer": "####"}]
    spec = "gsm8k=" + store(rows, tmp_path / "a.jsonl")
    assert [(row["id"], row["answer"]) for row in load(spec, characters())] == [(2, "6")]
    assert f"{spec}: dropped 2 answers that cannot be graded (row 1 has no ####; row 3 is empty)" in capsys.readouterr().out


def test_other_columns_of_a_preset_and_of_parquet(tmp_path):
    path = store([{"Q": "a", "x": {"y": {"z": 4}}, "prompt": "p", "answer": "7"}], tmp_path / "a.parquet")
    row = load(f"math-500={path}", characters(), prompt_column="Q", answer_column="x.y.z")[0]
    assert (row["prompt"], row["answer"]) == ("a", "4")
    row = load(f"gsm8k={path}", characters(), prompt_column="Q", answer_column="x.y.z")[0]  # no #### in a column of the user's
    assert row["answer"] == "4"
    row = load(path, characters())[0]
    assert (row["prompt"], row["answer"], row["id"]) == ("p", "7", 1)
    message = refusal(f"math-500={path}", characters())
    assert "no 'problem', only 'Q', 'x', 'prompt', 'answer'" in message and "--prompt-column" in message
    assert "--answer-column" in refusal(path, characters(), answer_column="solution")
    message = refusal(path, characters(), answer_column="x.u")
    assert "row 1" in message and "no 'x.u'" in message
    # a dotted name that is a column of its own, and the JSONL reader
    line = write(tmp_path, {"a.b": "p", "a": {"b": "q"}, "reward_model": {"ground_truth": "3"}})
    row = load(line, characters(), prompt_column="a.b", answer_column="reward_model.ground_truth")[0]
    assert (row["prompt"], row["answer"]) == ("p", "3")


@pytest.mark.parametrize("gold", ["['70']", "1000", "-1", "7.5", ""])
def test_aime_golds_are_integers(tmp_path, gold):
    path = store([AIME24[0], AIME24[1] | {"answer": gold}], tmp_path / "a.parquet")
    message = refusal(f"aime24={path}", characters())
    assert f"row 2: the answer is {gold!r}" in message and "0 to 999" in message


def clone(folder):
    """A clone of the hub's GSM8K: two configs, two splits."""
    rows = PUBLISHED["gsm8k"][0]
    for config, sign in ("main", ""), ("socratic", "Why? "):
        for split, part in ("train", rows[:2]), ("test", rows[2:]):
            part = [row | {"question": sign + row["question"]} for row in part]
            store(part, folder / config / f"{split}-00000-of-00001.parquet")
    card = "---\nconfigs:\n"
    for config in "main", "socratic":
        card += f"- config_name: {config}\n  data_files:\n"
        card += "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "test"))
    (folder / "README.md").write_text(card + "---\n# GSM8K\n")
    return str(folder)


def test_folders(tmp_path):
    folder = clone(tmp_path / "gsm8k")
    assert [row["prompt"] for row in load(f"gsm8k={folder}", characters())] == ["How many clips?", "How much?"]
    assert [row["prompt"] for row in load(f"gsm8k:test={folder}", characters())] == ["What is left?"]
    message = refusal(f"gsm8k:validation={folder}", characters())
    assert "no split 'validation'" in message and "train, test" in message and "--data" in message
    # files without a card; the only split there is, whatever its name
    store(PUBLISHED["math-500"][0], tmp_path / "plain" / "rows.parquet")
    assert len(load(f"math-500={tmp_path / 'plain'}", characters())) == 1
    assert "'test'" in refusal(f"math-500:test={tmp_path / 'plain'}", characters())


def test_hub_names_are_asked_for_as_published(tmp_path, monkeypatch):
    folder, real, asked = clone(tmp_path / "clone"), datasets.load_dataset, []

    def from_the_clone(name, config=None, **kwargs):
        asked.append((name, config, kwargs["split"], kwargs.pop("revision", None)))
        return real(folder, config, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", from_the_clone)
    for spec, split, count in [("gsm8k", "train", 2), ("gsm8k:test", "test", 1)]:
        assert len(load(spec, characters())) == count
        assert asked.pop() == ("openai/gsm8k", "main", split, PRESETS["gsm8k"].revision)
    message = refusal("gsm8k:tset", characters())
    assert "gsm8k:tset" in message and "Unknown split" in message and "train" in message and "NAME:SPLIT" in message
    message = refusal("someone/else:test", characters(), prompt_column="question")  # no config: the library lists them
    assert asked.pop() == ("someone/else", None, "test", None) and "main" in message and "someone/else" in message
    monkeypatch.setitem(PRESETS, "gsm8k", PRESETS["gsm8k"]._replace(config="mian"))
    assert "mian" in refusal("gsm8k", characters())


@pytest.mark.parametrize("count, right", [(29, False), (30, True), (31, False)])
def test_an_aime_year_of_the_hub_has_30_problems(count, right, tmp_path, monkeypatch):
    rows = [AIME24[0] | {"problem": f"Problem {i}"} for i in range(count)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_list(rows + rows[:1]))
    if right:
        assert len(load("aime24", characters())) == 30
    else:
        assert f"{count} problems" in refusal("aime24", characters())
    path = store(rows, tmp_path / "a.parquet")
    assert len(load(f"aime24={path}", characters())) == count


@pytest.mark.parametrize("spec, fix", [("gsm8k:test", "gsm8k=PATH"), ("aime25", "aime25=PATH"), ("owner/name", ".parquet")])
def test_without_a_network_one_line_says_what_to_do(spec, fix):
    message = refusal(spec, characters())
    assert f"--data or --eval-data {spec}:" in message and fix in message


@pytest.mark.parametrize("spec, words", [
    ("gms8k", ["no such file or data set", "did you mean gsm8k?", "math-500"]),
    ("aime2024:test", ["did you mean aime24"]),
    ("gsm9k=rows.parquet", ["did you mean gsm8k?"]),
    ("gsm8k=", ["no such file"]),
    ("gsm8k=none.parquet", ["no such file"]),
    ("math-500=rows.csv", ["unknown format"]),
    ("rows.csv", ["unknown format"]),
    ("broken.parquet", ["cannot be loaded", "mend"]),
    ("math-500=cut.jsonl", ["cannot be loaded", "mend"]),
    ("empty.parquet", ["no data"]),
])
def test_mistaken_specs(spec, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    (tmp_path / "broken.parquet").write_text("not parquet")
    (tmp_path / "cut.jsonl").write_text('{"problem": "a", "answer": "4"}\n{"problem": ')
    features = datasets.Features({"prompt": datasets.Value("string"), "answer": datasets.Value("string")})
    datasets.Dataset.from_dict({"prompt": [], "answer": []}, features=features).to_parquet("empty.parquet")
    message = refusal(spec, characters())
    assert f"--data or --eval-data {spec}: " in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_messages(ending, tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = store([{"prompt": chat, "answer": "2"}, {"prompt": turns, "answer": "3"}], tmp_path / f"a.{ending}")
    tokenizer = characters(TEMPLATE)
    rows = load(path, tokenizer)
    for row, messages in zip(rows, [chat, turns], strict=True):
        assert row["prompt_ids"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert [row["prompt"] for row in rows] == ["1+1?", "a\n\nb\n\nc"]
    # the flag's system prompt replaces the data's; without a template the user's words are the prompt
    row = load(path, tokenizer, system_prompt="Be kind.")[0]
    text = "".join(tokenizer.convert_ids_to_tokens(row["prompt_ids"]))
    assert text == "<s>system|Be kind.\nuser|1+1?\nassistant|"
    rows = load(path, characters())
    assert ["".join(characters().convert_ids_to_tokens(row["prompt_ids"])) for row in rows] == ["1+1?", "a\n\nb\n\nc"]


@pytest.mark.parametrize("messages", [[], ["a"], [{"role": "user"}], [{"role": "user", "content": None}],
                                      [{"content": "a"}, {"role": "user", "content": "b"}],
                                      [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]])
def test_lists_that_are_no_messages(tmp_path, messages):
    message = refusal(write(tmp_path, {"prompt": messages, "answer": "1"}), characters())
    assert "line 1" in message and "'prompt' is a list" in message and "--prompt-column" in message


# ------------------------------------------------------------------------------------------------------------------------
# reasoning-gym


def test_reasoning_gym_rows_grade_themselves():
    import reasoning_gym

    rows = load("rg:chain_sum,size=20,min_terms=2,max_terms=3", characters(), seed=5)
    task = reasoning_gym.create_dataset("chain_sum", size=20, seed=5, min_terms=2, max_terms=3)
    assert len(rows) == 20
    for row, entry in zip(rows, task, strict=True):
        assert row["prompt"] == entry["question"] + "\n\nPut the final answer in \\boxed{}."
        assert row["answer"] == entry["answer"] and row["check"](row["answer"]) == 1.0
        assert row["check"](None) == task.score_answer(None, entry) and row["check"]("x") == task.score_answer("x", entry)
        assert type(row["check"](row["answer"])) is float
    assert all("check" not in row for row in load("arith:test", characters(), size=3))


def test_a_task_grades_what_equality_would_refuse():
    row = load("rg:countdown,size=1", characters())[0]  # any expression with the right value
    assert row["check"](row["answer"]) == row["check"](f"({row['answer']})") == 1.0 > row["check"]("0")
    row = load("rg:prime_factorization,size=1", characters())[0]  # its parser raises on words
    assert row["check"](row["answer"]) == 1.0 > row["check"]("two times three") == 0.0
    assert load("rg:rush_hour,size=1", characters())[0]["answer"] == ""  # no one reference answer


def test_reasoning_gym_splits_share_no_problem(capsys):
    train, test = load("rg:chain_sum", characters()), load("rg:chain_sum:test", characters())
    assert len(test) > 1900 < len(train) and overlap(train, test) == 0 == overlap(test, train)
    assert load("rg:chain_sum:train,size=9", characters())[0]["prompt"] == train[0]["prompt"]
    assert load("rg:chain_sum,size=9", characters(), seed=3)[0]["prompt"] != train[0]["prompt"]
    assert load("rg:chain_sum:test,size=5", characters(), seed=3)[4]["prompt"] == test[4]["prompt"]  # the same for all seeds
    # 10 x 10 one-digit sums and differences: most of them held out
    capsys.readouterr()
    spec = ",size=100,min_terms=2,max_terms=2,max_digits=1"
    train, test = load("rg:chain_sum" + spec, characters()), load("rg:chain_sum:test" + spec, characters())
    assert 0 < len(train) < 100 and overlap(train, test) == 0
    assert "problems that rg:chain_sum:test holds out" in capsys.readouterr().out
    spec = "rg:chain_sum,size=400,min_terms=2,max_terms=2,max_digits=1"
    assert "holds out all" in refusal(spec.replace("400", "5000"), characters())


@pytest.mark.parametrize("spec, words", [
    ("rg:chain_sums", ["no task 'chain_sums'", "did you mean chain_sum"]),
    ("rg:", ["no task ''"]),
    ("rg:chain_sum:tset", ["no split 'tset'", "rg:chain_sum:test"]),
    ("rg:chain_sum,min_term=2", ["no option 'min_term'", "did you mean min_terms"]),
    ("rg:chain_sum,seed=2", ["no option 'seed'"]),
    ("rg:chain_sum,size=many", ["size=many"]),
    ("rg:chain_sum,size=0", ["size=0"]),
    ("rg:chain_sum,min_terms=9,max_terms=2", ["max_terms must be"]),
    ("rg:chain_sum,min_terms=few", ["refuses"]),
])
def test_mistaken_tasks(spec, words):
    message = refusal(spec, characters())
    assert f"--data or --eval-data {spec}: " in message
    for word in words:
        assert word in message


def test_sizes(tmp_path):
    for spec in "arith:", "arith:test", "rg:chain_sum", "rg:chain_sum:test":
        assert len(load(spec, characters(), size=7)) == 7
    assert len(load("rg:chain_sum,size=3", characters(), size=7)) == 3
    path = write(tmp_path, *[{"prompt": f"{i}", "answer": "1"} for i in range(9)])
    assert [len(load(path, characters(), size=size)) for size in (4, 20, None)] == [4, 9, 9]


# ------------------------------------------------------------------------------------------------------------------------
# rows


def test_repeated_prompts_are_dropped_and_counted(tmp_path, capsys):
    path = write(tmp_path, {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "a", "answer": "1"},
                 {"prompt": "a\n", "answer": "5"})
    assert [(row["id"], row["answer"]) for row in load(path, characters())] == [(1, "1"), (2, "2")]
    said = "dropped 2 repeated prompts (the first is kept), 1 of them with a different answer"
    assert capsys.readouterr().out == f"{path}: {said}\n"


def test_long_prompts_are_dropped_and_counted(tmp_path, capsys):
    path = write(tmp_path, {"prompt": "x" * 9, "answer": "1"}, {"prompt": "x" * 8, "answer": "2"},
                 {"prompt": "y", "answer": "2"})
    tokenizer = characters(adds_bos=True)  # the BOS counts
    assert [row["id"] for row in load(path, tokenizer, max_prompt_tokens=9)] == [2, 3]
    assert "dropped 1 prompts longer than 9 tokens" in capsys.readouterr().out
    message = refusal(path, tokenizer, max_prompt_tokens=1)
    assert "longer than 1 tokens (--max-prompt-tokens" in message and "shortest has 2" in message


def test_ungradable_answers_are_dropped_and_counted(tmp_path, capsys):
    path = write(tmp_path, {"prompt": "a", "answer": ""}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": None},
                 {"prompt": "a", "answer": "3"})
    # the good second copy of "a" survives: answers are checked before repeats
    assert [(row["id"], row["answer"]) for row in load(path, characters())] == [(2, "2"), (4, "3")]
    out = capsys.readouterr().out
    assert "dropped 2 answers that cannot be graded" in out and "line 1 " in out and "line 3 " in out
    message = refusal(write(tmp_path, {"prompt": "a", "answer": ""}), characters())
    assert "none of the 1 answers" in message and "--answer-column" in message and "line 1" in message


def test_overlap_counts_evaluation_prompts():
    train = [{"prompt": "a"}, {"prompt": "b"}]
    assert overlap(train, [{"prompt": "b\n"}, {"prompt": "c"}, {"prompt": "a"}]) == 2
    assert overlap(train, [{"prompt": "A"}]) == 0


# ------------------------------------------------------------------------------------------------------------------------
# order


def test_every_epoch_is_a_permutation_of_its_own():
    rows = [{"prompt": str(i)} for i in range(20)]
    stream = Shuffled(rows, seed=7)
    drawn = [stream.next(3) for _ in range(20)]  # 60 draws = 3 epochs; 3 does not divide 20
    prompts = [int(row["prompt"]) for batch in drawn for row in batch]
    epochs = [prompts[:20], prompts[20:40], prompts[40:]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3 and epochs[0] != list(range(20))
    # the order is a function of (seed, epoch): no other seed shares it, nor one that differs above bit 32
    firsts = {tuple(row["prompt"] for row in Shuffled(rows, seed).next(20)) for seed in (6, 7, 8, 7 + 2**32)}
    assert len(firsts) == 4 and tuple(map(str, epochs[0])) in firsts
    assert tuple(map(str, epochs[1])) != tuple(row["prompt"] for row in Shuffled(rows, 8).next(20))


def test_more_rows_than_there_are():
    rows = [{"prompt": str(i)} for i in range(3)]
    drawn = [row["prompt"] for row in Shuffled(rows, 0).next(8)]
    stream = Shuffled(rows, 0)
    assert drawn == [stream.next(1)[0]["prompt"] for _ in range(8)]
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == ["0", "1", "2"]


@pytest.mark.parametrize("batches", [0, 1, 3, 4, 5, 8, 9])  # 12 rows, batches of 3: 4 and 8 are epoch ends
def test_a_resumed_shuffle_continues_exactly(batches):
    rows = [{"prompt": str(i)} for i in range(12)]
    whole, first, second = Shuffled(rows, 5), Shuffled(rows, 5), Shuffled(rows, 5)
    expected = [row["prompt"] for _ in range(14) for row in whole.next(3)]
    for _ in range(batches):
        first.next(3)
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"epoch": batches // 4, "position": 3 * batches % 12, "seed": 5, "rows": 12}
    second.next(7)  # the state replaces whatever was drawn before
    second.load_state_dict(state)
    assert [row["prompt"] for _ in range(14 - batches) for row in second.next(3)] == expected[3 * batches:]


def test_resume_refuses_other_data():
    rows = [{"prompt": str(i)} for i in range(4)]
    state = Shuffled(rows, 5).state_dict()
    with pytest.raises(UserError, match="4 rows.*--data.*3"):
        Shuffled(rows[:3], 5).load_state_dict(state)
    with pytest.raises(UserError, match="--seed 5.*--seed 6"):
        Shuffled(rows, 6).load_state_dict(state)


def test_no_global_random_state_is_touched(tmp_path):
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    load("arith:train", characters(), seed=1)
    for task in "pool_matrix", "list_functions":  # one seeds numpy, one draws from `random`
        load(f"rg:{task},size=3", characters(), seed=1)
    load(write(tmp_path, {"prompt": "a", "answer": "1"}), characters(TEMPLATE))
    Shuffled([{"prompt": "a"}, {"prompt": "b"}], 1).next(9)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    # and none is read: the same draws after any global seeding
    draws = []
    for seed in 1, 2:
        torch.manual_seed(seed)
        draws.append((arith_pairs("train", 5, 0), Shuffled(list(range(9)), 0).next(9)))
    assert draws[0] == draws[1]
    prompts = []
    for seed in 1, 2:
        random.seed(seed)
        prompts.append([row["prompt"] for row in load("rg:list_functions,size=3", characters())])
    assert prompts[0] == prompts[1]
