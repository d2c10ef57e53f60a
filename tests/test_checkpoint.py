"""Checkpoints: bitwise round trip, a plain transformers folder, and a whole one left behind by every failure.

    python -m pytest tests/test_checkpoint.py
"""

import collections
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys

import numpy
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import checkpoint
import fp8
import precision
from checkpoint import latest, load, rng_state, save, set_rng_state
from errors import UserError, run_main

STATE = {"step": 2, "position": [0, 7], "flags": {"lr": 1e-6, "out": "é", "resume": None}, "best": 0.1 + 0.2}
Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Forks of a process with OpenMP threads can hang."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(tie, dtype=torch.float32):
    """(model, tokenizer): 2 layers, hidden 32, a vocabulary of digits."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8, tie_word_embeddings=tie, eos_token_id=1, pad_token_id=0)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<pad>", "<eos>", *"0123456789+="])}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    return Qwen3ForCausalLM(config).to(dtype), tokenizer


def trained(model):
    """An optimizer state with something in it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    return optimizer.state_dict()


def save_tiny(out, step, **keywords):
    model, tokenizer = tiny(tie=True)
    return save(out, step, model, tokenizer, dict(model.named_parameters()), trained(model), {"step": step}, **keywords)


def names(out):
    return sorted(os.listdir(os.path.join(out, "checkpoints")))


def forked(job, out):
    """Run `job` as a script's main in a process of its own: (exit code, what it wrote to stderr)."""
    def main():
        with open(stderr, "w") as f:
            os.dup2(f.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        run_main(job)

    stderr = f"{out}.stderr"
    process = multiprocessing.get_context("fork").Process(target=main)  # fork: importing everything again takes seconds
    process.start()
    process.join(10)
    late = process.is_alive()
    process.kill()
    process.join()
    assert not late, "the process hangs"
    with open(stderr) as f:
        return process.exitcode, f.read()


def equal(a, b):
    if torch.is_tensor(a):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("tie", [True, False])
def test_round_trip_is_bitwise_and_loads_in_transformers(tmp_path, tie):
    model, tokenizer = tiny(tie)
    optimizer_state = trained(model)
    path = save(tmp_path, 2, model, tokenizer, model.state_dict(), optimizer_state, STATE)
    assert path == str(tmp_path / "checkpoints/step_000002") == latest(tmp_path)
    weights, loaded_optimizer, state = load(path)
    assert sorted(weights) == sorted(model.state_dict()) and "lm_head.weight" in weights
    assert all(equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert equal(optimizer_state, loaded_optimizer) and state == STATE

    again, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info  # nothing missing, unexpected or mismatched
    assert equal(dict(model.state_dict()), dict(again.state_dict()))
    assert (again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()) == tie
    ids = AutoTokenizer.from_pretrained(path)("1 + 2 =").input_ids
    assert ids == tokenizer("1 + 2 =").input_ids == [3, 12, 4, 13]
    assert {"generation_config.json", "tokenizer.json"} <= set(os.listdir(path))


def test_masters_are_saved_not_the_model(tmp_path):
    """A BF16 model with FP32 masters: the folder loads as FP32 and with the masters' bits."""
    model, tokenizer = tiny(tie=True, dtype=torch.bfloat16)
    masters = {name: p.float() + 1e-6 for name, p in model.named_parameters()}
    path = save(tmp_path, 1, model, tokenizer, masters, {}, {})
    again = AutoModelForCausalLM.from_pretrained(path)
    assert all(equal(masters[name], p.detach()) for name, p in again.named_parameters())
    assert model.config.dtype != torch.float32  # the live config is left alone
    with open(os.path.join(path, "config.json")) as f:
        config = json.load(f)
    assert config["dtype"] == "float32" and config["architectures"] == ["Qwen3ForCausalLM"]


def test_names_of_compiled_and_shared_tensors(tmp_path):
    model, tokenizer = tiny(tie=False)
    weights = {"_orig_mod." + name: p for name, p in model.named_parameters()}
    one = torch.randn(16, 32)  # two names for one tensor in a model that does not tie them: both are stored
    weights["_orig_mod.lm_head.weight"] = weights["_orig_mod.model.embed_tokens.weight"] = one
    path = save(tmp_path, 1, model, tokenizer, weights, {}, {})
    again, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(again.lm_head.weight, one) and torch.equal(again.model.embed_tokens.weight, one)
    with pytest.raises(AssertionError, match="one name"):
        save(tmp_path, 2, model, tokenizer, weights | dict(model.named_parameters()), {}, {})


def test_a_compiled_model_saves_the_plain_names(tmp_path):
    model, tokenizer = tiny(tie=False)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.model.layers[0] = torch.compile(model.model.layers[0])
    compiled = torch.compile(model)  # nothing is compiled before a call
    named = dict(compiled.named_parameters())
    assert "_orig_mod.model.layers.0._orig_mod.mlp.up_proj.weight" in named
    path = save(tmp_path, 1, compiled, tokenizer, named, {}, {})
    weights = load(path)[0]
    assert sorted(weights) == sorted(plain) and all(equal(weights[name], p) for name, p in plain.items())
    again, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()) and equal(dict(again.named_parameters()), plain)
    assert again.config.architectures == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_trained_in_fp8_is_a_plain_one_on_the_disk(tmp_path, tie):
    model, tokenizer = tiny(tie)
    names, ids = list(model.state_dict()), torch.arange(8)[None]
    assert len(precision.convert(model, "fp8-row").converted) == 14 and list(model.state_dict()) == names
    masters = precision.Masters(model, torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    masters.publish()
    path = save(tmp_path, 1, model, tokenizer, masters.weights, optimizer.state_dict(), {})

    def logits(model, plain=False):
        with torch.no_grad(), precision.high_precision(model) if plain else contextlib.nullcontext():
            return model(ids).logits

    again, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()) and list(again.state_dict()) == names
    assert not any(isinstance(layer, fp8.FP8Linear) for layer in again.modules())
    assert all(equal(masters.weights[name].detach(), p.detach()) for name, p in again.named_parameters())
    again = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert torch.equal(logits(again), logits(model, plain=True))
    assert not torch.equal(logits(again), logits(model))  # in FP8 it computes something else, until converted too
    precision.convert(again, "fp8-row")
    assert torch.equal(logits(again), logits(model))
    masters.release()
    again = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(logits(again), logits(model, plain=True))


def draws():
    """Some of every generator; odd numbers of normals, so that half of a pair is held back."""
    return [random.random(), random.gauss(0, 1), *numpy.random.randn(3), numpy.random.randint(2**31), *torch.randn(17).tolist()]


def test_random_state_survives_json_exactly():
    draws()
    state = rng_state()
    text = json.dumps(state, indent=2)
    assert "cuda" not in state and json.loads(text) == state and text.count("\n") < 20
    first = draws()
    assert first != draws()
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    set_rng_state(json.loads(text))
    assert rng_state() == state and draws() == first


def test_random_state_of_gpus(monkeypatch, capsys):
    """What CUDA is asked and told; there need not be a GPU."""
    states, told = [torch.arange(16, dtype=torch.uint8), torch.full((16,), 255, dtype=torch.uint8)], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", told.append)
    state = json.loads(json.dumps(rng_state()))
    for here in (4, 2, 1, 0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda here=here: here)
        set_rng_state(state)
    assert [len(one) for one in told] == [2, 2, 1] and equal(told[0], states) and equal(told[2], states[:1])
    assert capsys.readouterr().err.splitlines() == [
        f"warning: the checkpoint has the random state of 2 GPUs, here are {here}" for here in (1, 0)]
    set_rng_state({name: part for name, part in state.items() if name != "cuda"})
    assert len(told) == 3 and capsys.readouterr().err == ""


@pytest.mark.gpu
def test_random_state_of_a_real_gpu():
    torch.randn(5, device="cuda")
    state = json.loads(json.dumps(rng_state()))
    first = torch.randn(17, device="cuda")
    torch.cuda.manual_seed_all(1)
    set_rng_state(state)
    assert len(state["cuda"]) == torch.cuda.device_count() and torch.equal(torch.randn(17, device="cuda"), first)


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path):
    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            noise = torch.randn(1, 8, 32) * random.random() + numpy.random.randn()
            model(inputs_embeds=noise, labels=torch.arange(8)[None]).loss.backward()
            optimizer.step()

    def fresh():
        model, tokenizer = tiny(tie=True)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), tokenizer

    model, optimizer, tokenizer = fresh()
    steps(model, optimizer, 2)
    path = save(tmp_path, 2, model, tokenizer, model.state_dict(), optimizer.state_dict(), {"rng": rng_state()})
    steps(model, optimizer, 2)
    whole, moments = dict(model.state_dict()), optimizer.state_dict()
    for _ in range(2):  # the first must leave the files it has mapped as they were
        draws()
        model, optimizer, _ = fresh()
        weights, optimizer_state, state = load(path)
        model.load_state_dict(weights)
        optimizer.load_state_dict(optimizer_state)
        set_rng_state(state["rng"])
        steps(model, optimizer, 2)
        assert equal(dict(model.state_dict()), whole) and equal(optimizer.state_dict(), moments)


def mapped(tensor, path):
    """Whether the memory of a tensor is a map of this file, and still shared: no page of it was written by this process."""
    inside = False
    with open("/proc/self/smaps") as f:
        for line in f:
            field = line.split()
            if not field[0].endswith(":"):  # START-END flags offset device inode PATH, then a line per property
                start, end = (int(edge, 16) for edge in field[0].split("-"))
                inside = start <= tensor.data_ptr() < end and field[-1] == path
            elif inside and field[0] == "Anonymous:":
                return field[1] == "0"
    return False


def tensors(tree):
    if torch.is_tensor(tree):
        return [tree]
    return [tensor for item in (tree.values() if isinstance(tree, dict) else ()) for tensor in tensors(item)]


def test_load_maps_the_files(tmp_path):
    """So that the processes of one machine hold one copy; and replacing or pruning the checkpoint leaves the tensors whole."""
    model, tokenizer = tiny(tie=True)
    odd = {"empty": torch.zeros(0, 3), "byte": torch.tensor([7], dtype=torch.uint8), "view": torch.arange(6.0).view(2, 3).T}
    path = save(tmp_path, 2, model, tokenizer, model.state_dict(), trained(model) | {"odd": odd}, {})
    weights, optimizer_state, _ = load(path)
    copies = {name: tensor.clone() for name, tensor in weights.items()}, [tensor.clone() for tensor in tensors(optimizer_state)]
    assert equal(optimizer_state["odd"], odd) and len(copies[1]) > 60
    for file, loaded in (("model.safetensors", tensors(weights)), ("optimizer.pt", tensors(optimizer_state))):
        assert all(mapped(tensor, os.path.join(path, file)) for tensor in loaded if tensor.numel())

    weights["model.norm.weight"].zero_()  # a private map: the file does not see it
    assert equal(load(path)[0]["model.norm.weight"], copies[0]["model.norm.weight"])
    weights["model.norm.weight"].copy_(copies[0]["model.norm.weight"])
    weights, optimizer_state, _ = load(path)
    other = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    save(tmp_path, 2, model, tokenizer, other, {}, {})  # replaces it
    save(tmp_path, 3, model, tokenizer, other, {}, {}, keep_last=1)  # and prunes it
    assert names(tmp_path) == ["step_000003"]
    assert equal(weights, copies[0]) and equal(tensors(optimizer_state), copies[1])


def test_same_step_is_replaced_and_tmp_removed(tmp_path):
    save_tiny(tmp_path, 2)
    os.makedirs(tmp_path / "checkpoints/.tmp-step_000009")  # left by a killed save
    (tmp_path / "checkpoints/.tmp-step_000009/model.safetensors").write_text("half")
    assert latest(tmp_path) == str(tmp_path / "checkpoints/step_000002")
    model, tokenizer = tiny(tie=False)
    save(tmp_path, 2, model, tokenizer, dict(model.named_parameters()), {}, {"second": True})
    assert names(tmp_path) == ["step_000002"] and load(latest(tmp_path))[2] == {"second": True}


def test_kill_between_the_two_renames(tmp_path):
    """The old folder of the same step has been moved aside, the new one has not taken its name yet."""
    path = save_tiny(tmp_path, 2)
    os.rename(path, tmp_path / "checkpoints/.old-step_000002")
    assert load(latest(tmp_path))[2] == {"step": 2}
    save_tiny(tmp_path, 4)
    assert names(tmp_path) == ["step_000002", "step_000004"] and load(path)[2] == {"step": 2}


def test_keep_last(tmp_path):
    for step in (1, 2, 3):
        save_tiny(tmp_path, step)
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000003"]
    os.truncate(tmp_path / "checkpoints/step_000003/optimizer.pt", 100)
    save_tiny(tmp_path, 4, keep_last=2)  # the damaged one does not count as one of the two, and goes
    assert names(tmp_path) == ["step_000002", "step_000004"]
    save_tiny(tmp_path, 1000000, keep_last=1)
    assert names(tmp_path) == ["step_1000000"]
    save_tiny(tmp_path, 5, keep_last=1)  # resumed from an older step: what is newer is not its business
    assert names(tmp_path) == ["step_000005", "step_1000000"]


def test_the_best_is_kept(tmp_path):
    kept = []
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 6), (7, 6)):
        save_tiny(tmp_path, step, keep_last=1, best=best)
        kept.append([int(name[-1]) for name in names(tmp_path)])
    assert kept == [[1], [2], [2, 3], [2, 4], [2, 5], [6], [6, 7]]  # a former best goes as any other does
    save_tiny(tmp_path, 8, keep_last=2, best=6)
    save_tiny(tmp_path, 9, keep_last=2, best=6)  # it does not count as one of the two
    assert names(tmp_path) == ["step_000006", "step_000008", "step_000009"]
    save_tiny(tmp_path, 10, keep_last=0, best=10)  # keep_last=0 keeps all
    assert len(names(tmp_path)) == 4


def test_older_ones_go_only_after_the_new_one_is_whole(tmp_path, monkeypatch):
    save_tiny(tmp_path, 1, best=1)
    save_tiny(tmp_path, 2, best=1)
    monkeypatch.setattr(checkpoint, "save_file", lambda *a: (_ for _ in ()).throw(checkpoint.SafetensorError("no space")))
    with pytest.raises(UserError, match="no space"):
        save_tiny(tmp_path, 3, keep_last=1, best=3)
    assert names(tmp_path) == ["step_000001", "step_000002"]  # the former best too


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "config.json"])
@pytest.mark.parametrize("how", ["cut", "empty", "gone"])
def test_damaged_newest_falls_back(tmp_path, capsys, name, how):
    good, bad = save_tiny(tmp_path, 2), save_tiny(tmp_path, 4)
    victim = os.path.join(bad, name)
    if how == "gone":
        os.remove(victim)
    else:
        os.truncate(victim, os.path.getsize(victim) - 2 if how == "cut" else 0)
    assert latest(tmp_path) == good
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.startswith(f"warning: skipped checkpoint {bad}: {name} is ")
    if name != "config.json":
        with pytest.raises(UserError) as caught:
            load(bad)
        assert str(caught.value).startswith(f"cannot read {victim}: ") and "\n" not in str(caught.value)
    assert load(good)[2] == {"step": 2}


def test_no_checkpoint(tmp_path):
    assert latest(tmp_path) is None
    os.makedirs(tmp_path / "checkpoints/.tmp-step_000001")
    assert latest(tmp_path) is None
    with pytest.raises(UserError, match="step_000001/model.safetensors: No such file"):
        load(tmp_path / "checkpoints/step_000001")


def test_optimizer_state_cannot_run_code(tmp_path):
    path = save_tiny(tmp_path, 1)
    torch.save({"x": Usage}, os.path.join(path, "optimizer.pt"))
    with pytest.raises(UserError, match="optimizer.pt: Weights only load failed"):
        load(path)


def test_state_that_is_no_json_leaves_nothing(tmp_path):
    model, tokenizer = tiny(tie=True)
    with pytest.raises(TypeError):  # a programmer's mistake keeps its traceback
        save(tmp_path, 1, model, tokenizer, dict(model.named_parameters()), {}, {"rng": torch.zeros(2)})
    assert names(tmp_path) == []


def test_too_little_space_is_seen_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**30, 2**30, 2**20))
    monkeypatch.setattr(checkpoint, "write", lambda *a: pytest.fail("it began to write"))
    with pytest.raises(UserError, match="free; there is no previous checkpoint; free space or change --out / --save-every"):
        save_tiny(tmp_path, 4)
    assert names(tmp_path) == []


def check_full(out, big, monkeypatch, limit=None):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**40))  # a quota, or another job that is faster
    model, tokenizer = tiny(tie=True)
    weights, extra = dict(model.named_parameters()), {"extra": torch.zeros(2**20)}  # 4 MiB more
    save(out, 2, model, tokenizer, weights, {}, {"step": 2})

    def job():
        if limit:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        more, optimizer_state = ({}, extra) if big == "optimizer.pt" else (extra, {})
        save(out, 4, model, tokenizer, weights | more, optimizer_state, {"step": 4}, keep_last=1)

    code, stderr = forked(job, out)
    root = os.path.join(out, "checkpoints")
    assert code == 2 and stderr.count("\n") == 1, stderr
    assert stderr.startswith(f"error: could not save checkpoint {root}/step_000004: ")
    assert stderr.endswith(f"; the previous checkpoint {root}/step_000002 is intact; "
                           "free space or change --out / --save-every\n")
    assert names(out) == ["step_000002"] and latest(out) == f"{root}/step_000002"
    assert load(latest(out))[2] == {"step": 2}
    AutoModelForCausalLM.from_pretrained(latest(out))
    return stderr


@pytest.mark.parametrize("big", ["model.safetensors", "optimizer.pt"])
def test_file_size_limit(tmp_path, big, monkeypatch):
    line = check_full(str(tmp_path / "out"), big, monkeypatch, limit=2**20)
    assert ("File too large" if big == "model.safetensors" else "optimizer.pt could not be written in full") in line


@pytest.mark.parametrize("big", ["model.safetensors", "optimizer.pt"])
def test_full_disk(tmp_path, big, monkeypatch):
    out = str(tmp_path / "out")
    os.mkdir(out)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", out]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        line = check_full(out, big, monkeypatch)
    finally:
        subprocess.run(["umount", "-l", out], check=True)
    assert ("No space left" if big == "model.safetensors" else "optimizer.pt could not be written in full") in line


@pytest.mark.parametrize("owner, moment", [(checkpoint, "save_file"), (torch, "save"), (checkpoint, "fsync")])
def test_kill_9_in_the_middle(tmp_path, monkeypatch, owner, moment):
    path = save_tiny(tmp_path, 2)
    model, tokenizer = tiny(tie=True)
    weights, optimizer_state = dict(model.named_parameters()), trained(model)
    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, lambda *a: os.kill(os.getpid(), signal.SIGKILL))
        code, stderr = forked(lambda: save(tmp_path, 4, model, tokenizer, weights, optimizer_state, {}, 1), tmp_path)
    assert code == -signal.SIGKILL, stderr
    assert names(tmp_path) == [".tmp-step_000004", "step_000002"]  # it died with half a folder
    assert latest(tmp_path) == path and load(path)[2] == {"step": 2}
    save_tiny(tmp_path, 4)
    assert names(tmp_path) == ["step_000002", "step_000004"]
