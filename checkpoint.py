"""Checkpoints: plain transformers folders that are either whole or absent.

`out/checkpoints/step_000006/` holds the state after six finished steps:

    config.json, tokenizer files, model.safetensors   FP32 masters under the model's own names: from_pretrained loads the folder
    optimizer.pt                                      optimizer_state, any nest of tensors and plain values (torch.save)
    state.json                                        counters, data position, flags

A save goes to `.tmp-step_000006` beside it, is flushed to the disk file by file, and takes its name by a rename: a kill or a
full disk at any moment leaves the previous checkpoint as it was. `latest` checks sizes as well and falls back to the one
before, because a copy or a failing disk can still cut a file short.

    path = save("out", 6, model, tokenizer, dict(model.named_parameters()), optimizer.state_dict(), {"rng": rng_state()})
    weights, optimizer_state, state = load(latest("out"))      # maps of the files: see `load`
    set_rng_state(state["rng"])

Only one process may save. Weights are saved in the dtype they have; what is low precision is made from them after a load.
"""

import base64
import copy
import json
import os
import pickle
import random
import re
import shutil
import sys
import zipfile

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from errors import UserError

FILES = ("config.json", "tokenizer_config.json", "model.safetensors", "optimizer.pt", "state.json")
HEADROOM = 32 * 2**20  # bytes asked of the disk beyond the tensors: tokenizer, JSON files, headers


def save(out_dir, step, model, tokenizer, weights, optimizer_state, state, keep_last=0, best=None):
    """Write the checkpoint of `step` finished steps and return its folder.

    keep_last   how many of the newest stay; 0 keeps every older one. What goes, goes after the new one is whole
    best        the step of the run's best checkpoint so far (it may be this one): it stays as well, until another is the best
    """
    root, name = os.path.join(out_dir, "checkpoints"), f"step_{step:06d}"
    final, temp, old = (os.path.join(root, prefix + name) for prefix in ("", ".tmp-", ".old-"))
    weights, aliases = plain_weights(model, weights)
    try:
        os.makedirs(root, exist_ok=True)
        clean(root)
        need, free = nbytes(weights) + nbytes(optimizer_state) + HEADROOM, shutil.disk_usage(root).free
        if free < need:
            raise OSError(None, f"it needs {need / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free")
        os.mkdir(temp)
        write(temp, model, tokenizer, weights, aliases, optimizer_state, state)
        if os.path.exists(final):  # a non-empty folder cannot be renamed over: `clean` undoes a kill between the two
            os.replace(final, old)
        os.replace(temp, final)
        fsync(root)
        fsync(out_dir)
    except (OSError, SafetensorError) as error:
        clean(root)
        previous = newest(root, warn=False)
        kept = f"the previous checkpoint {previous} is intact" if previous else "there is no previous checkpoint"
        raise UserError(f"could not save checkpoint {final}: {getattr(error, 'strerror', None) or error}; {kept}; "
                        "free space or change --out / --save-every") from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)  # there only after a failure
    clean(root)
    older = [path for path in folders(root) if number(path) <= step] if keep_last else []
    whole = [path for path in older if damage(path) is None]
    kept = whole[:keep_last] + [path for path in whole if number(path) == best]
    for path in [path for path in older if path not in kept]:  # damaged ones too: they are of no use
        gone = os.path.join(root, ".tmp-" + os.path.basename(path))  # a kill must not leave half a folder under its name
        os.replace(path, gone)
        shutil.rmtree(gone)
    return final


def plain_weights(model, weights):
    """What goes into model.safetensors: contiguous CPU tensors under the names from_pretrained looks for.

    A tensor of two names is stored once. If the config ties the two, the tied name is left out and noted (`aliases`), and
    from_pretrained ties it again; if not, the second gets its own copy.
    """
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    tied = getattr(model, "_tied_weights_keys", None) or () if is_tied else ()
    named = {name.replace("_orig_mod.", ""): tensor.detach() for name, tensor in weights.items()}
    assert len(named) == len(weights), "two weights have one name once torch.compile's _orig_mod. is stripped"
    out, aliases, seen = {}, {}, {}
    for name in sorted(named, key=lambda name: name in tied):  # the tied names come last
        place = (named[name].data_ptr(), named[name].shape, named[name].dtype)
        if place in seen and name in tied:
            aliases[name] = seen[place]
            continue
        shared = place in seen and named[name].numel() > 0
        out[name] = named[name].cpu().contiguous().clone() if shared else named[name].cpu().contiguous()
        seen.setdefault(place, name)
    return out, aliases


def write(folder, model, tokenizer, weights, aliases, optimizer_state, state):
    """All files of a checkpoint, each flushed to the disk. Everything that fails for want of space raises OSError or
    SafetensorError; the tokenizer, whose Rust code raises a bare Exception, goes first, just after the space was checked."""
    tokenizer.save_pretrained(folder)
    config = copy.deepcopy(model.config)
    config.dtype = next(iter(weights.values())).dtype  # of these weights, not of the model that was trained
    config.architectures = config.architectures or [type(getattr(model, "_orig_mod", model)).__name__]
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:  # its save_pretrained refuses what its loader accepts
        model.generation_config.to_json_file(os.path.join(folder, "generation_config.json"))
    save_file(weights, os.path.join(folder, "model.safetensors"), {"format": "pt", "aliases": json.dumps(aliases)})
    try:
        torch.save(optimizer_state, os.path.join(folder, "optimizer.pt"))
    except RuntimeError as error:  # torch's zip writer counts bytes and loses the errno
        if "inline_container" not in str(error) and "PytorchStreamWriter" not in str(error):
            raise
        raise OSError(None, "optimizer.pt could not be written in full, is the disk full?") from error
    with open(os.path.join(folder, "state.json"), "w", encoding="utf-8") as f:
        json.dump(state, f, indent=2)
    for name in os.listdir(folder):
        fsync(os.path.join(folder, name))
    fsync(folder)


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def nbytes(tree):
    """Bytes of the tensors in a nest of dicts and lists."""
    if torch.is_tensor(tree):
        return tree.numel() * tree.element_size()
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return sum(nbytes(item) for item in items)


def number(path):
    return int(os.path.basename(path).rpartition("_")[2])


def folders(root):
    """The step folders, newest first; one moved aside counts where a kill left nothing in its place."""
    names = set(os.listdir(root)) if os.path.isdir(root) else set()
    names = [name for name in names if re.fullmatch(r"(\.old-)?step_\d+", name)
             and not (name.startswith(".old-") and name.removeprefix(".old-") in names)]
    return sorted((os.path.join(root, name) for name in names), key=number, reverse=True)


def clean(root):
    """Remove what a killed save left, and put back a checkpoint that was moved aside for its replacement."""
    for name in os.listdir(root) if os.path.isdir(root) else []:
        path, home = os.path.join(root, name), os.path.join(root, name.removeprefix(".old-"))
        if name.startswith(".old-step_") and not os.path.exists(home):
            os.replace(path, home)
        elif name.startswith((".old-step_", ".tmp-step_")):
            shutil.rmtree(path, ignore_errors=True)


def damage(path):
    """What is wrong with a checkpoint folder, or None. Looks at names, sizes and the ends of files, not at every byte."""
    for name in FILES:
        if not os.path.isfile(os.path.join(path, name)):
            return f"{name} is missing"
    try:
        with safe_open(os.path.join(path, "model.safetensors"), "pt"):  # refuses a header that does not match the size
            pass
    except SafetensorError as error:
        return f"model.safetensors is damaged ({error})"
    if not zipfile.is_zipfile(os.path.join(path, "optimizer.pt")):  # its directory is at the end
        return "optimizer.pt is cut short"
    for name in ("state.json", "config.json", "tokenizer_config.json"):
        try:
            with open(os.path.join(path, name), encoding="utf-8") as f:
                json.load(f)
        except ValueError:
            return f"{name} is damaged"
    return None


def newest(root, warn):
    for path in folders(root):
        problem = damage(path)
        if problem is None:
            return path
        if warn:
            print(f"warning: skipped checkpoint {path}: {problem}", file=sys.stderr)
    return None


def latest(out_dir):
    """The newest complete checkpoint of a run, or None; one line on stderr for each newer one that is damaged."""
    return newest(os.path.join(out_dir, "checkpoints"), warn=True)  # only reads: the run may be saving right now


def load(path):
    """(weights by name, optimizer state, state) of a checkpoint, on the CPU.

    The tensors are private maps of the files: a page is read when it is first touched, processes that read the same file share
    it, and writing to a tensor copies the page and leaves the file alone. They stay good when the checkpoint is replaced or
    pruned meanwhile: that unlinks files and never overwrites one (on NFS, unlinking by another machine does break them).
    """
    name = "model.safetensors"
    try:
        with safe_open(os.path.join(path, name), "pt") as f:  # its default backend maps the file, get_tensor does not copy
            weights = {key: f.get_tensor(key) for key in f.keys()}
            aliases = json.loads((f.metadata() or {}).get("aliases", "{}"))
            weights |= {alias: weights[key] for alias, key in aliases.items()}
        name = "optimizer.pt"
        is_zip = zipfile.is_zipfile(os.path.join(path, name))  # asked to map what is none, torch tells how to save it instead
        optimizer_state = torch.load(os.path.join(path, name), map_location="cpu", weights_only=True, mmap=is_zip)
        name = "state.json"
        with open(os.path.join(path, name), encoding="utf-8") as f:
            state = json.load(f)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or "it is empty").splitlines()[0]
        raise UserError(f"cannot read {os.path.join(path, name)}: {reason}; delete the folder to resume from the "
                        "checkpoint before it") from error
    return weights, optimizer_state, state


def encode(array):
    return base64.b64encode(array.tobytes()).decode("ascii")


def decode(text, dtype):
    return numpy.frombuffer(base64.b64decode(text), dtype).copy()  # torch takes no read-only memory


def rng_state():
    """The state of every global generator, for state.json: Python's, numpy's legacy one, torch's on the CPU and, once this
    process uses CUDA, on each GPU it sees. Generators that code makes for itself (torch.Generator) are that code's to save."""
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = numpy.random.get_state()
    state = {
        "python": [version, encode(numpy.array(words, "<u4")), gauss],
        "numpy": [name, encode(key.astype("<u4")), int(position), int(has_gauss), float(cached)],
        "torch": encode(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_initialized():  # asking sooner would start CUDA in a process that does without
        state["cuda"] = [encode(one.numpy()) for one in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state):
    """Put every generator back where `rng_state` found it; the CUDA part may be missing. A state of more GPUs than there are
    here (a run that moved to a CPU) is used as far as it goes, with one line on stderr."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(decode(words, "<u4").tolist()), gauss))
    name, key, *rest = state["numpy"]
    numpy.random.set_state((name, decode(key, "<u4"), *rest))
    torch.set_rng_state(torch.from_numpy(decode(state["torch"], "u1")))
    saved, here = state.get("cuda", []), torch.cuda.device_count()
    if len(saved) > here:
        print(f"warning: the checkpoint has the random state of {len(saved)} GPUs, here are {here}", file=sys.stderr)
    if saved and here:
        torch.cuda.set_rng_state_all([torch.from_numpy(decode(one, "u1")) for one in saved[:here]])
