"""The embedded model: its arithmetic, its tokenizer, its size, its warm start and its cache.

    python -m pytest tests/test_tiny.py
"""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import reward
import sources
import tiny
from errors import UserError

SHORT = {"steps": 15, "batch": 24}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.mark.parametrize("a, b, text", [
    (347, 586, "7+6=13;4+8+1=13;3+5+1=9;"), (999, 999, "9+9=18;9+9+1=19;9+9+1=19;"), (100, 100, "0+0=0;0+0=0;1+1=2;"),
    (905, 95 + 100, "5+5=10;0+9+1=10;9+1+1=11;"),
])  # fmt: skip
def test_worked_sum(a, b, text):
    assert tiny.worked_sum(a, b) == text
    digits = [step.split("=")[1] for step in text.split(";")[:-1]]  # the last digits of the columns spell the sum
    assert int(digits[2] + digits[1][-1] + digits[0][-1]) == a + b


def test_tokenizer(tokenizer, tmp_path):
    text = "347+586=7+6=13;4+8+1=13;3+5+1=9;####933<eos>"
    ids = tokenizer(text).input_ids
    assert len(ids) == 8 + len(tiny.worked_sum(347, 586)) + 1 + 3 + 1  # characters, and `####` is one
    assert ids.count(tokenizer.convert_tokens_to_ids("####")) == 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.unk_token_id not in ids and tokenizer.bos_token is None
    assert tokenizer.decode(ids) == text and tokenizer.decode(ids, skip_special_tokens=True) == text[:-5]
    assert tokenizer("347+586=").input_ids == [tokenizer.convert_tokens_to_ids(c) for c in "347+586="]  # nothing added
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text).input_ids == ids and again.decode(ids) == text and again.eos_token_id == tokenizer.eos_token_id


def test_an_answer_of_either_style_is_graded_right(tokenizer):
    for style in ("", tiny.worked_sum(347, 586)):
        answer = tokenizer.decode(tokenizer(f"{style}####933<eos>").input_ids, skip_special_tokens=True)
        assert reward.grade(answer, "933") == 1 and reward.grade(answer, "934") == 0


def test_model_sizes(tokenizer):
    model = tiny.make_model(tokenizer)
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.2e6
    linears = {name: layer for name, layer in model.model.named_modules() if isinstance(layer, torch.nn.Linear)}
    assert len(linears) == 7 * 4
    assert all(x.in_features % 128 == 0 and x.out_features % 128 == 0 for x in linears.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.dtype == torch.float32
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_model_leaves_the_global_generator_alone(tokenizer):
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    a = tiny.make_model(tokenizer, 1)
    assert torch.equal(torch.rand(4), expected)
    b, c = tiny.make_model(tokenizer, 1), tiny.make_model(tokenizer, 2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.model.embed_tokens.weight, c.model.embed_tokens.weight)


def supervised_loss(model, tokenizer):
    """Mean loss of the answer's tokens on 64 held-out sums, both styles alike."""
    losses = []
    for a, b in sources.arith_pairs("test", 32, 0):
        for style in ("", tiny.worked_sum(a, b)):
            ids = torch.tensor([tokenizer(f"{a}+{b}={style}####{a + b}<eos>").input_ids])
            logp = torch.log_softmax(model(ids).logits[0, 7:-1].float(), -1)
            losses.append(-logp.gather(1, ids[0, 8:, None]).mean())
    return torch.stack(losses).mean().item()


@pytest.fixture(scope="module")
def warm(tokenizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "SETTINGS", tiny.SETTINGS | SHORT)
        torch.manual_seed(5)
        model = tiny.warm_start(tiny.make_model(tokenizer), tokenizer, progress=False)
    return model, torch.rand(1).item()


def test_warm_start_lowers_the_loss(tokenizer, warm):
    with torch.no_grad():
        before, after = (supervised_loss(m, tokenizer) for m in (tiny.make_model(tokenizer), warm[0]))
    assert before > 2.7 and after < before - 0.5  # 2.8 = log 17: nothing known


def test_warm_start_gives_an_ordinary_model_back(tokenizer, warm):
    model, drawn = warm
    assert model.dtype == torch.float32 and not model.training and all(p.requires_grad for p in model.parameters())
    assert any((p != p.bfloat16().float()).any() for p in model.parameters())  # the masters, not their BF16 roundings
    torch.manual_seed(5)
    assert torch.rand(1).item() == drawn
    ids = torch.tensor([tokenizer("1+2=").input_ids])
    model(ids, labels=ids).loss.backward()  # it can be trained: no hook of the warm start takes its gradients away
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_prepare_caches(tmp_path, monkeypatch, capsys):
    calls = []

    def warm_start(model, tokenizer, seed=0, progress=True):
        calls.append(seed)
        return model

    monkeypatch.setattr(tiny, "warm_start", warm_start)
    out = tmp_path / "models" / "tiny"
    assert tiny.prepare(out, progress=False) == str(out) and calls == [0]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.float32 and tokenizer("####").input_ids == [len(tokenizer) - 1]
    stamp = os.stat(out / "model.safetensors").st_mtime_ns
    assert tiny.prepare(str(out)) == str(out) and calls == [0]
    assert os.stat(out / "model.safetensors").st_mtime_ns == stamp
    tiny.prepare(out, seed=3)
    assert calls == [0, 3] and json.loads((out / "tiny.json").read_text())["seed"] == 3
    monkeypatch.setattr(tiny, "SETTINGS", tiny.SETTINGS | {"steps": 7})
    tiny.prepare(out, seed=3)
    assert calls == [0, 3, 3] and json.loads((out / "tiny.json").read_text())["steps"] == 7
    assert os.listdir(out.parent) == ["tiny"]  # nothing temporary is left


def test_prepare_refuses_a_foreign_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "warm_start", lambda *a, **k: pytest.fail("trained before looking at the folder"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="mine"):
        tiny.prepare(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_failed_warm_start_leaves_the_old_model(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "warm_start", lambda model, *a, **k: model)
    out = tmp_path / "tiny"
    tiny.prepare(out)

    def broken(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "warm_start", broken)
    with pytest.raises(KeyboardInterrupt):
        tiny.prepare(out, seed=1)
    assert json.loads((out / "tiny.json").read_text())["seed"] == 0
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0
