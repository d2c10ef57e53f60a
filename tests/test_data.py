"""Data: ids equal the chat template's, BOS at most once, every broken line is named, a resumed shuffle continues exactly.

python -m pytest tests/test_data.py
"""

import json
import random
import string

import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data import Shuffled, arith_pairs, load, overlap
from errors import UserError

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ m.role }}|{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant|{% endif %}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


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
