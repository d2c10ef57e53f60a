"""The embedded model: a Qwen3 of about 1M parameters that RL can teach something in minutes on a CPU.

The task is adding two three-digit numbers. The warm start is supervised, on answers in two styles:

    347+586=####938                                  60 %: a bare guess, off by up to 9 either way
    347+586=7+6=13;4+8+1=13;3+5+1=9;####933          40 %: worked from the right, carry written out, correct

so the model guesses more often than it works, and guesses are mostly wrong. Nothing tells it that working pays except the
reward: GRPO moves the mixture towards worked answers, and accuracy and length rise together: long chain-of-thought in a jar.

The folder is an ordinary transformers one (config, safetensors, tokenizer), for AutoModelForCausalLM and for vLLM. All sizes
are multiples of 128, so that every FP8 recipe runs through every backend. Tokens are characters, but `####` is one token.

    python tiny.py [--out out/tiny] [--seed 0]          about a minute on 2 cores; cached, a second call returns at once
"""

import json
import os
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import sources
from errors import Flags, UserError, run_main
from precision import Masters

SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789+=;", "####"]
SETTINGS = {"steps": 500, "batch": 96, "lr": 2e-3, "worked": 0.4, "guess_error": 9, "version": 4}  # a change makes a new cache


def make_tokenizer():
    """Characters, `####` as one token, EOS but no BOS."""
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("####|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def make_model(tokenizer, seed=0):
    """A randomly initialised Qwen3ForCausalLM in FP32, 4 layers x 128, GQA, tied embeddings."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=True, rope_theta=10000.0,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # the library initialises from the global generator: leave that as it was
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def worked_sum(a, b):
    """'7+6=13;4+8+1=13;3+5+1=9;' for 347 + 586: columns from the right, the carry written as +1."""
    steps, carry = [], 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total};")
        carry = total // 10
    return "".join(steps)


def warm_start(model, tokenizer, seed=0, progress=True):
    """Supervised training on the two styles, BF16 forward with FP32 masters; trains `model` in place and returns it in FP32."""
    pairs = sources.arith_pairs("train", sources.ARITH_ROWS["train"], seed)
    generator = torch.Generator().manual_seed(seed)
    steps, batch = SETTINGS["steps"], SETTINGS["batch"]
    model.train()
    masters = Masters(model, torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=SETTINGS["lr"], betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    for step in tqdm(range(steps), desc="warm start", disable=None if progress else True):
        for group in optimizer.param_groups:  # 20 steps up, then down to a tenth along a cosine
            t = torch.tensor(step / steps * torch.pi)
            group["lr"] = SETTINGS["lr"] * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * torch.cos(t).item())
        chosen = torch.randint(len(pairs), (batch,), generator=generator).tolist()
        worked = (torch.rand(batch, generator=generator) < SETTINGS["worked"]).tolist()
        errors = torch.randint(-SETTINGS["guess_error"], SETTINGS["guess_error"] + 1, (batch,), generator=generator).tolist()
        styles = [[], []]  # guesses and worked answers go through the model apart: a third less padding
        for k, w, error in zip(chosen, worked, errors, strict=True):
            a, b = pairs[k]
            answer = f"{worked_sum(a, b)}####{a + b}" if w else f"####{a + b + error}"
            styles[w].append(f"{a}+{b}={answer}{tokenizer.eos_token}")
        losses, count = [], 0
        for texts in filter(None, styles):
            tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False)
            ids, lengths = tokens.input_ids, tokens.attention_mask.sum(1, keepdim=True)
            position = torch.arange(ids.shape[1] - 1)
            counted = (position >= 7) & (position < lengths - 1)  # the answer: predictions from `=` (8th character) to the EOS
            logits = model(input_ids=ids).logits[:, :-1]
            losses.append(F.cross_entropy(logits[counted].float(), ids[:, 1:][counted], reduction="sum"))
            count += int(counted.sum())
        (sum(losses) / count).backward()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()
        masters.publish()
        masters.zero_grad()
    masters.release()
    return model.eval()


def prepare(out="out/tiny", seed=0, progress=True):
    """The path of the warm-started model: made on the first call, cached afterwards (another seed or setting makes it anew)."""
    out = Path(out)
    marker = out / "tiny.json"
    made_with = {**SETTINGS, "seed": seed}
    if marker.exists() and json.loads(marker.read_text()) == made_with:
        return str(out)
    if out.exists() and not marker.exists():
        raise UserError(f"--out {out} exists and is not a tiny model's folder; choose another or delete it")
    tokenizer = make_tokenizer()
    model = warm_start(make_model(tokenizer, seed), tokenizer, seed, progress)
    temporary = out.with_name(out.name + f".tmp{os.getpid()}")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / "tiny.json").write_text(json.dumps(made_with))
    if out.exists():
        shutil.rmtree(out)
    os.replace(temporary, out)
    return str(out)


def main():
    parser = Flags(description="Make (or find) the warm-started embedded model.")
    parser.add_argument("--out", default="out/tiny", help="folder of the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of initialisation and of the training sums")
    args = parser.parse_args()
    path = prepare(args.out, args.seed)
    model = AutoModelForCausalLM.from_pretrained(path)
    print(f"{path}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    run_main(main)
