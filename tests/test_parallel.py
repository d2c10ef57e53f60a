"""Several processes: two gloo ranks against one, on converted FP8 modules and tied embeddings; resume; what is refused.

    python -m pytest tests/test_parallel.py
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from small import first_letter_even, make_home, untimed_rows

import acrl
import checkpoint
import data
import flags
import parallel
import plot
import precision
import reward
import train_dapo
import train_grpo
from errors import Everywhere, Interrupted, UserError
from eval import evaluate
from learner import make_calibration, old_pass, split, update
from logprob import token_logps
from rollout import make_engine
from stopping import Stop

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory, sums=range(100, 124))


def argv(home, out, *extra):
    text = f"--model {home / 'model'} --data {home / 'sums.jsonl'} --out {out} --device cpu --steps 2 --prompts-per-step 4 "
    text += "--group-size 4 --updates-per-step 2 --micro-tokens 128 --max-tokens 12 --lr 1e-3 --eval-every 0"
    return text.split() + [str(x) for x in extra]


def grpo(home, out, *extra):
    args = flags.parse_flags(argv(home, out, *extra))
    train_grpo.train(args)


def dapo(home, out, *extra):
    extra = ("--warmup", 0, "--overlong-cache", 4, *extra)
    args = flags.parse_flags(argv(home, out, *extra), extend=train_dapo.add_dapo_flags)
    train_grpo.train(train_dapo.check(args), train_dapo.collect)


def final(out, step):
    return checkpoint.load(str(out / "checkpoints" / f"step_{step:06d}"))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -----------------------------------------------------------------------------
# two ranks in one start: what each case needs is in `home`


def meet(rank, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    reward.grade_batch, plot.draw, parallel.stop = first_letter_even, lambda *a: None, lambda: None
    assert parallel.start("cpu") == "cpu"


LENGTHS = [1, 2, 30, 3, 12, 1, 7, 25, 9, 4, 4, 17]  # unequal however they are dealt


class Recorder:
    """Stands in for the optimizer and keeps the whole gradients it is given."""

    def __init__(self, masters):
        self.masters, self.grads = masters, None

    def step(self):
        self.grads = {name: parallel.full(w.grad).double().clone() for name, w in self.masters.weights.items()}


def one_update(home, recipe, *extra):
    """(gradients, update's metrics, old_pass's metrics, calibration's metrics) of one mini-batch on weights moved after the old
    pass, by however many processes there are. KL to the starting weights, as the loop has it."""
    from test_train_grpo import samples_of

    sizes = ("--grad-clip", 1e9, "--micro-tokens", 60, "--max-tokens", 30)
    args = flags.parse_flags(argv(home, "unused", "--precision", recipe, *sizes, *extra))
    args.updates_per_step = 1
    model, _, _ = precision.load_model(args.model, recipe, "cpu", torch.float32)
    shard = (lambda m: parallel.shard(m, "cpu")) if parallel.world() > 1 else None
    dtype = precision.recipe_of(recipe)["dtype"]
    reference = precision.frozen(model, dtype, shard=shard)
    masters = precision.Masters(model, dtype, shard=shard)
    if args.activation_checkpointing:
        parallel.checkpoint_layers(model)
    samples = samples_of(LENGTHS, rewards=[0.0, 1.0, math.nan] + [0.0, 1.0, 0.0] * 3)
    minis = split(samples, args, 0)
    calib = make_calibration(args)
    before = old_pass(model, minis, args, acrl.ACRL(), True, reference)
    generator = torch.Generator().manual_seed(7)
    moved = {}
    for name, w in masters.weights.items():
        whole = parallel.full(w)
        moved[name] = whole + 0.3 * torch.randn(whole.shape, generator=generator) * whole.abs().mean()
    masters.load(moved)
    recorder = Recorder(masters)
    metrics = update(model, masters, recorder, minis[0], args, calib, True)
    return recorder.grads, metrics, before, calib.update()


CASES = {"fp32": ("--calib-reference", "fp32", "--clip", "calibrated", "--kl-coef", 0.1, "--calib-share", 0.5),
         "fp8-row": ("--clip", "calibrated", "--kl-coef", 0.1, "--activation-checkpointing"),
         "bf16": ("--loss-agg", "seq-mean-token-mean", "--correction", "acrl", "--shadow-every", 1)}
CALIBRATED = ("--clip", "calibrated", "--calib-interval", 2)
RESUMED = {"grpo": CALIBRATED, "grpo_vanilla": (), "dapo": CALIBRATED, "dapo_vanilla": ("--correction", "acrl")}


def worker(rank, port, home):
    meet(rank, port)
    model, _, _ = precision.load_model(str(home / "model"), "fp8-row", "cpu", torch.float32)
    want, _ = token_logps(precision.frozen(model, torch.bfloat16), *a_batch())
    sharded = precision.frozen(model, torch.bfloat16, shard=lambda m: parallel.shard(m, "cpu"))
    assert all(hasattr(p, "device_mesh") for p in sharded.parameters())
    assert sharded.lm_head.weight is sharded.model.embed_tokens.weight
    got, _ = token_logps(sharded, *a_batch())
    assert torch.equal(got, want)  # gathered layer by layer, the same numbers

    assert parallel.gather([rank]) == [0, 1] and parallel.gather([rank], together=2) == [0]
    assert parallel.total(rank + 1) == 3 and parallel.largest(rank) == 1 and parallel.from_main(rank) == 0
    assert parallel.block(5) == ((0, 2), (2, 5))[rank] and parallel.block(5, together=2) == (0, 5)
    assert parallel.joined(torch.full((rank + 1,), float(rank))).tolist() == [0, 1, 1]
    with pytest.raises(UserError, match="rank 1's engine differs"):
        parallel.agree("engine", rank)
    with pytest.raises(Everywhere, match="no room"):
        parallel.on_main(refuse)
    assert parallel.meet(lambda: [rank] * (rank + 1)) == [0, 1, 1] and not parallel.working
    with pytest.raises(Everywhere, match="rank 1: no room"):
        parallel.meet(refuse if rank else list)  # on both ranks
    with Stop() as stop:  # rank 1 is signalled while it samples: both stop, for its reason
        with pytest.raises(Interrupted, match="SIGTERM"), stop.interruptible():
            parallel.meet(signalled if rank else list)
        assert stop.reason == "SIGTERM" and not parallel.working
    with Stop() as stop:  # in between, where ranks talk to each other, a signal waits until they agree
        with pytest.raises(Interrupted), stop.interruptible():
            signal.raise_signal(signal.SIGINT) if rank else None
            assert parallel.gather([rank]) == [0, 1]
        assert stop.exit_code() == 130
    if rank == 0:
        torch.save(scored(home), home / "scored.pt")
    else:
        scored(home)

    for recipe, extra in CASES.items():
        found = one_update(home, recipe, *extra)
        if rank == 0:
            torch.save(found, home / f"two_{recipe}.pt")
    loaded = ("--load-rollouts", home / "one" / "rollouts", "--precision", "fp32")
    grpo(home, home / "two", *loaded)
    for name in RESUMED:
        train = grpo if name.startswith("grpo") else dapo
        flags_ = (*RESUMED[name], "--precision", "fp8-row", "--save-every", 3, "--keep-last", 0)
        train(home, home / f"{name}_whole", *flags_, "--steps", 6)
        train(home, home / f"{name}_part", *flags_, "--steps", 3)
        torch.rand(rank + 1)
        train(home, home / f"{name}_part", *flags_, "--steps", 6, "--resume")
    (home / f"done{rank}").touch()
    torch.distributed.destroy_process_group()


def refuse():
    raise UserError("no room")


def signalled():
    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("sampling goes on")


def scored(home):
    """evaluate's summary and records of 5 problems x 3, which two ranks cannot share evenly."""
    model, tokenizer, _ = precision.load_model(str(home / "model"), "fp32")
    problems = data.load(str(home / "sums.jsonl"), tokenizer)[:5]
    summary, records = evaluate(make_engine("hf", model, tokenizer, "fp32"), tokenizer, problems, 3, 1.0, 12, seed=4)
    return {k: v for k, v in summary.items() if k not in ("seconds", "tok_per_s")}, records


def a_batch():
    from logprob import collate

    return collate([[3, 4], [5]], [[6, 7, 8], [9, 1]], 0), 1.0


@pytest.fixture(scope="module")
def ranks(home):
    """Everything two ranks do, in one start; the tests below look at what they left in `home`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "grade_batch", first_letter_even)
        patch.setattr(plot, "draw", lambda *a: None)
        grpo(home, home / "one", "--precision", "fp32", "--save-rollouts")
        torch.multiprocessing.spawn(worker, args=(free_port(), home), nprocs=2)
        yield home
    torch.set_num_threads(threads)


def test_two_ranks_do_what_they_should(ranks):
    assert (ranks / "done0").exists() and (ranks / "done1").exists()


def relative(a, b):
    difference = sum((a[k] - b[k]).square().sum() for k in b).sqrt()
    return (difference / sum(v.square().sum() for v in b.values()).sqrt()).item()


@pytest.mark.parametrize("recipe,bound", [("fp32", 1e-5), ("bf16", 0.02), ("fp8-row", 0.05)])
def test_two_ranks_give_the_gradients_metrics_and_calibration_of_one(ranks, recipe, bound):
    """The same twelve answers, dealt to two ranks with unequal numbers of tokens and of micro-batches, one without a reward."""
    two = torch.load(ranks / f"two_{recipe}.pt", weights_only=False)
    one = one_update(ranks, recipe, *CASES[recipe])
    assert relative(two[0], one[0]) < bound
    for a, b in zip(two[1:], one[1:], strict=True):
        assert a.keys() == b.keys()
        if recipe == "fp32":  # quantised forwards differ in the last bit where a micro-batch has another shape
            for k in b:
                assert float(a[k]) == pytest.approx(float(b[k]), rel=1e-4, abs=1e-6, nan_ok=True), k
    assert float(two[1]["n/tok"]) == float(one[1]["n/tok"]) == sum(LENGTHS) - 30
    assert float(two[2]["mismatch/abs_dlogp_mean"]) == pytest.approx(float(one[2]["mismatch/abs_dlogp_mean"]), rel=0.02)
    if recipe != "bf16":
        assert two[3]["calib/n_neg"] == one[3]["calib/n_neg"] > 0 and two[1]["kl_ref/k3"] > 0
    else:
        assert float(two[2]["acrl/Y"]) == pytest.approx(float(one[2]["acrl/Y"]), rel=0.02)


def test_two_ranks_evaluate_every_problem_once(ranks):
    two, one = torch.load(ranks / "scored.pt", weights_only=False), scored(ranks)
    assert two[1] == one[1] and len(one[1]) == 15
    assert two[0] == one[0]


def test_two_ranks_train_as_one_on_the_same_answers(ranks):
    one, two = untimed_rows(ranks / "one"), untimed_rows(ranks / "two")
    assert one.keys() == two.keys() and one["step"] == two["step"] == [1, 2]
    for name in one:
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5, nan_ok=True), name
    a, b = final(ranks / "one", 2), final(ranks / "two", 2)
    assert a[0].keys() == b[0].keys() and a[2]["data"] == b[2]["data"]
    assert all(torch.allclose(a[0][k], b[0][k], atol=2e-4) for k in a[0])  # AdamW divides tiny gradients by their own size
    moved = precision.load_model(str(ranks / "model"), "fp32")[0].state_dict()
    assert max((a[0][k] - moved[k]).abs().max() for k in a[0]) > 1e-3


def assert_equal_runs(whole, part):
    """Two finished runs of six steps hold the same, bit for bit, times and flags aside."""
    a, b = untimed_rows(whole), untimed_rows(part)
    assert a["step"] == [1, 2, 3, 4, 5, 6]
    assert a.keys() == b.keys() and all(x == y or x != x and y != y for k in a for x, y in zip(a[k], b[k], strict=True))
    assert (whole / "samples.jsonl").read_text() == (part / "samples.jsonl").read_text()
    (weights, optimizer, state), other = final(part, 6), final(whole, 6)
    assert same(weights, other[0]) and all(same(optimizer["state"][i], other[1]["state"][i]) for i in optimizer["state"])
    for x in (state, other[2]):
        x["flags"] = x["summary"]["train_seconds"] = None
    assert state == other[2]


@pytest.mark.parametrize("name", RESUMED)
def test_two_ranks_resume_bitwise(ranks, name):
    assert_equal_runs(ranks / f"{name}_whole", ranks / f"{name}_part")


def test_what_two_ranks_wrote_one_resumes(ranks, tmp_path, capsys):
    """The checkpoint is one plain folder: no trace of shards, and the data go on where they stopped."""
    import shutil

    shutil.copytree(ranks / "grpo_part", tmp_path / "out")
    flags_ = (*RESUMED["grpo"], "--precision", "fp8-row", "--keep-last", 0, "--steps", 7, "--resume")
    grpo(ranks, tmp_path / "out", *flags_)
    assert "saved by 2 processes, resumed on 1" in capsys.readouterr().out
    assert untimed_rows(tmp_path / "out")["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert final(tmp_path / "out", 6)[2]["data"] != final(tmp_path / "out", 7)[2]["data"]


@pytest.mark.parametrize("train", [grpo, dapo])
@pytest.mark.parametrize("extra", [(), ("--clip", "calibrated", "--calib-interval", 2, "--kl-coef", 0.01)])
def test_one_process_resumes_bitwise(home, tmp_path, monkeypatch, train, extra):
    """6 steps against 3 and 3: parameters, moments, rows, samples, data position, generators."""
    monkeypatch.setattr(reward, "grade_batch", first_letter_even)
    monkeypatch.setattr(plot, "draw", lambda *a: None)
    extra = (*extra, "--save-every", 3, "--keep-last", 0, "--lr-schedule", "cosine", "--lr-decay-steps", 6)
    train(home, tmp_path / "whole", *extra, "--steps", 6)
    train(home, tmp_path / "part", *extra, "--steps", 3)
    torch.rand(3)
    train(home, tmp_path / "part", *extra, "--steps", 6, "--resume")
    assert_equal_runs(tmp_path / "whole", tmp_path / "part")


# -----------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize("world,extra,words", [
    (2, ("--rollout-kernels", "exact"), ("--rollout-kernels exact", "2 processes")),
    (2, ("--device", "cuda:1"), ("--device cuda:1", "--device cuda")),
    (8, ("--updates-per-step", "4"), ("--updates-per-step 4", "mini-batches of 4", "8 processes")),
    (2, ("--clip", "calibrated", "--calib-reference", "fp32"), ("--calib-reference fp32", "2 processes")),
    (2, ("--shadow-every", "1", "--activations", "fp32"), ("--calib-reference bf16", "--activations fp32")),
    (3, ("--engine", "vllm", "--vllm-tp", "2"), ("--vllm-tp 2", "found 3")),
    (1, ("--cpu-offload",), ("--cpu-offload", "several GPU processes")),
    (2, ("--cpu-offload",), ("--cpu-offload", "several GPU processes")),
])  # fmt: skip
def test_what_several_processes_cannot_do_is_refused(monkeypatch, world, extra, words):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    line = ("--device", "cpu", "--prompts-per-step", "4", "--group-size", "4", "--updates-per-step", "2", *extra)
    with pytest.raises(UserError) as caught:
        flags.parse_flags(list(line))
    assert all(word in str(caught.value) for word in words), str(caught.value)


# -----------------------------------------------------------------------------
# the documented launch lines


def launch(out, home, *extra, options=(), script="train_grpo.py"):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *options]
    command += [os.path.join(HERE, script), *argv(home, out, *extra)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2])
def test_accelerate_launch_with_vllm_on_two_processes_and_resume(home, tmp_path, together):
    """An engine each, or one over both; the engines' fingerprints are compared after every step."""
    extra = ("--engine", "vllm", "--precision", "fp8-row", "--sync-check-every", 1, "--save-every", 3, "--gate", 0.1)
    extra += ("--vllm-tp", together)
    for more, last in (((), 5), (("--resume",), 7)):
        run = launch(tmp_path / "out", home, *extra, "--steps", last, *more, options=("--main_process_port", str(free_port())))
        out, err = run.communicate(timeout=400)
        assert run.returncode == 0, out[-3000:] + err[-3000:]
    assert "resumed" in out and untimed_rows(tmp_path / "out")["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert max(untimed_rows(tmp_path / "out")["mismatch/abs_dlogp_mean"]) < 0.05


@pytest.mark.slow
def test_two_machines_meet_over_localhost(home, tmp_path):
    port = str(free_port())
    options = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port)
    runs = [launch(tmp_path / "out", home, options=(*options, "--machine_rank", str(i))) for i in (0, 1)]
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, out[-3000:] + err[-3000:]
    assert untimed_rows(tmp_path / "out")["step"] == [1, 2]


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_on_two_processes(home, tmp_path):
    """In the middle of sampling, as schedulers end a job: the last finished step is saved long before torchrun kills."""
    out, options = tmp_path / "out", ("--main_process_port", str(free_port()))
    extra = ("--steps", 500, "--max-tokens", 240, "--prompts-per-step", 16, "--precision", "bf16", "--save-every", 0)
    run, csv = launch(out, home, *extra, options=options), out / "metrics.csv"
    while run.poll() is None and not (csv.exists() and len(csv.read_text().splitlines()) > 2):
        time.sleep(0.05)
    start = time.monotonic()
    run.send_signal(signal.SIGTERM)
    text, err = run.communicate(timeout=120)
    assert time.monotonic() - start < 28, "torchrun had to kill"
    steps = untimed_rows(out)["step"]
    assert checkpoint.latest(str(out)).endswith(f"step_{int(steps[-1]):06d}"), text[-2000:] + err[-2000:]
    again = ("--steps", int(steps[-1]) + 1, "--resume")
    done = launch(out, home, *extra, *again, options=("--main_process_port", str(free_port())))
    text, err = done.communicate(timeout=300)
    assert done.returncode == 0 and untimed_rows(out)["step"] == [*steps, steps[-1] + 1], err[-2000:]


@pytest.mark.slow
def test_a_mistake_is_told_once(home, tmp_path):
    mistakes = ((("--group-size", 1), "--group-size 1"), (("--resume",), "no complete checkpoint"),
                (("--data", "nofile.jsonl"), "nofile.jsonl"), (("--gate", 1e-12, "--precision", "fp8-row"), "gate: "))
    for extra, words in mistakes:
        run = launch(tmp_path / "out", home, *extra, options=("--main_process_port", str(free_port())))
        out, err = run.communicate(timeout=300)
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert run.returncode and len(lines) == 1 and words in lines[0], err[-3000:]
