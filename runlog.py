"""What a run leaves behind: metrics.csv, samples.jsonl, one line a step on the terminal, and small JSON files.

A CSV is read by every tool, costs no account and no network, and survives a kill: each row is flushed as it is
written. `step` counts finished steps, so that the first row is step 1 and a run resumed from step S continues with row
S + 1; rows and samples past S, which the killed run wrote after its last checkpoint, are dropped first. A metric that
first appears later (an evaluation) widens the header: the file is rewritten next to itself and renamed, so that a kill
leaves either the old file or the new one. TensorBoard and wandb get the same rows if asked (`Wandb` below says how far).

    log = RunLog("out/run", resume_step=None)      # rank 0 only: there is one writer
    log.log(1, {"reward": 0.5, "entropy": 1.2})
    log.samples(1, [{"prompt": "1+1=", "completion": "2", "reward": 1.0}])
    log.line(1, 100, {"reward": 0.5, "entropy": 1.2})
    read_csv("out/run/metrics.csv")["reward"]      # [0.5]
"""

import contextlib
import csv
import inspect
import json
import math
import os
import secrets

from tqdm import tqdm

from errors import UserError

# the step log: heading -> metric; 120 columns with step numbers of up to nine digits
COLUMNS = {"reward": "reward", "acc": "acc", "len/mean": "len/mean", "entropy": "entropy", "neg_lo": "clip/neg_lo",
           "pos_hi": "clip/pos_hi", "abs_dlogp": "mismatch/abs_dlogp_mean", "is/mean": "is/mean",
           "grad_norm": "grad_norm", "sec/step": "sec/step", "tok/s": "tok_per_s/rollout"}
HEADING_EVERY = 20  # lines


@contextlib.contextmanager
def disk_errors(path):
    """A full disk or a folder that is gone is one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; make room, then go on with --resume") from error


@contextlib.contextmanager
def replacing(path):
    """A text file to write that takes the place of `path` only once it is complete and on the disk."""
    temp = f"{path}.tmp"
    try:
        with disk_errors(path):
            with open(temp, "w", newline="", encoding="utf-8") as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            os.replace(temp, path)
    finally:
        if os.path.exists(temp):  # only after a failure
            os.remove(temp)


def plain(value):
    """JSON has neither tensors nor NaN: a 0-dim tensor or numpy scalar becomes its number, a non-finite number null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors of any shape, numpy arrays and scalars
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path, obj):
    """Write `obj` to `path` atomically."""
    with replacing(path) as f:
        json.dump(plain(obj), f, indent=2, allow_nan=False)
        f.write("\n")


def read_csv(path):
    """Columns of a metrics.csv as lists of floats, NaN where empty. A last row cut off by a kill is left out."""
    try:
        with open(path, newline="", encoding="utf-8") as f:
            text = f.read()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    header, *rows = list(csv.reader(text[:text.rfind("\n") + 1].splitlines())) or [[]]
    if not header:
        raise UserError(f"{path} has no header line: it is no metrics.csv, or the run was killed before its first step")
    columns = {name: [] for name in header}
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise UserError(f"{path} line {number}: {len(row)} fields, the header has {len(header)}")
        for name, cell in zip(header, row, strict=True):
            try:
                columns[name].append(float(cell) if cell else math.nan)
            except ValueError as error:
                raise UserError(f"{path} line {number}, column {name}: {cell!r} is not a number") from error
    return columns


def progress(iterable_or_total, desc):
    """A tqdm bar over an iterable, or one of that many ticks to `.update()`; silent when stderr is no terminal."""
    if isinstance(iterable_or_total, int):
        return tqdm(total=iterable_or_total, desc=desc, leave=False, disable=None, dynamic_ncols=True)
    return tqdm(iterable_or_total, desc=desc, leave=False, disable=None, dynamic_ncols=True)


def short(value):
    """A number in at most 8 characters, "-" for a missing one."""
    if value is None:
        return "-"
    value = float(value)
    text = f"{value:.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
    return text if len(text) <= 8 else f"{value:.1e}" if len(f"{value:.1e}") <= 8 else f"{value:.0e}"


def wandb_mode():
    """What to give wandb.init as mode: "offline", and a line that says so, where nobody is logged in, since wandb would ask for
    a key or give up; else None, so that WANDB_MODE or wandb's own settings decide."""
    import wandb

    if os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
        return None
    # login(prompt=False) came with wandb 0.30, which deprecates what came before; neither uses the network
    new = "prompt" in inspect.signature(wandb.login).parameters
    if wandb.login(prompt=False) if new else wandb.api.api_key:
        return None
    print("--wandb: not logged in, so it writes offline; `wandb login` before a run, `wandb sync` after it", flush=True)
    return "offline"


class Wandb:
    """The rows in wandb as well, as far as that works. What goes wrong in it is one printed line, and the run goes on.

    The run's id is kept in the run folder's wandb_id: a resumed run continues the same wandb run. wandb takes no step twice;
    what a killed run logged after its last checkpoint stays there, and the resumed run's rows for those steps are ignored.
    """

    def __init__(self, out_dir, config):
        self.run, self.errors = None, ()
        try:
            # by name: without the package, a folder called wandb, which it leaves where it ran, imports as an empty module
            from wandb import Error, init
        except ImportError as error:
            self.stop(f"{error} (pip install wandb)")
            return
        self.errors = (Error, ConnectionError)  # the second is what comes of wandb's own process having died
        id_path = os.path.join(out_dir, "wandb_id")
        if not os.path.exists(id_path):
            with replacing(id_path) as f:
                f.write(secrets.token_hex(8))  # of no seeded generator: those give every run of a seed the same
        with open(id_path, encoding="utf-8") as f:
            run_id = f.read().strip()
        # allow_val_change: a resumed run may have other flags
        options = {"id": run_id, "resume": "allow", "config": plain(config or {}), "allow_val_change": True,
                   "project": os.environ.get("WANDB_PROJECT") or "lowprec-rl",
                   "dir": os.environ.get("WANDB_DIR") or os.path.abspath(out_dir)}
        try:
            self.run = init(mode=wandb_mode(), **options)
        except self.errors as error:
            self.stop(error)

    def stop(self, why):
        self.run = None
        print(f"--wandb: {' '.join(str(why).split()) or type(why).__name__}; the run goes on with metrics.csv", flush=True)

    def log(self, step, values):
        if self.run is not None:
            try:
                self.run.log(values, step=step, commit=True)  # else it would wait for the next step
            except self.errors as error:
                self.stop(error)

    def close(self):
        if self.run is not None:
            try:
                self.run.finish()
            except self.errors as error:
                self.stop(error)


class RunLog:
    """One run folder's metrics, samples and step lines. A new run moves an older run's files aside to NAME.bak.

    tensorboard, wandb   send the rows there as well; config (wandb's): the run's flags as a dict
    """

    def __init__(self, out_dir, tensorboard=False, resume_step=None, wandb=False, config=None):
        try:
            os.makedirs(out_dir, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {out_dir}: cannot make this folder: {error.strerror}") from error
        self.csv_path, self.samples_path = (os.path.join(out_dir, name) for name in ("metrics.csv", "samples.jsonl"))
        self.columns, self.rows, self.lines = ["step"], [], 0
        for path in (self.csv_path, self.samples_path, os.path.join(out_dir, "wandb_id")):
            if resume_step is None and os.path.exists(path):
                os.replace(path, f"{path}.bak")
        if resume_step is not None:
            self._drop_after(resume_step)
        self._rewrite_csv()
        self.samples_file = open(self.samples_path, "a", encoding="utf-8")
        self.writer = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UserError("--tensorboard needs the tensorboard package: pip install tensorboard") from error
            purge = None if resume_step is None else resume_step + 1
            self.writer = SummaryWriter(os.path.join(out_dir, "tensorboard"), purge_step=purge)
        self.wandb = Wandb(out_dir, config) if wandb else None

    def _drop_after(self, step):
        """Keep rows and samples up to `step`; a line cut off by a kill belongs to a later step and goes too."""
        if os.path.exists(self.csv_path) and os.path.getsize(self.csv_path):
            steps = read_csv(self.csv_path)["step"]
            with open(self.csv_path, newline="", encoding="utf-8") as f:
                table = list(csv.reader(f))  # the cells as they were written: not a digit changes
            self.columns = table[0]
            rows = [row for row, n in zip(table[1:], steps, strict=False) if n <= step]
            self.rows = [dict(zip(self.columns, row, strict=True)) for row in rows]
        if os.path.exists(self.samples_path):
            with open(self.samples_path, encoding="utf-8") as old, replacing(self.samples_path) as new:
                new.writelines(line for line in old if line.endswith("\n") and json.loads(line)["step"] <= step)

    def _rewrite_csv(self):
        with replacing(self.csv_path) as f:
            table = csv.DictWriter(f, self.columns, restval="", lineterminator="\n")
            table.writeheader()
            table.writerows(self.rows)
        self.csv_file = open(self.csv_path, "a", newline="", encoding="utf-8")

    def log(self, step, metrics):
        """One row for the finished step `step`; steps only go up."""
        assert not self.rows or step > int(self.rows[-1]["step"]), f"step {step} after step {self.rows[-1]['step']}"
        values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()
                  if value is not None}
        row = {"step": str(step)}
        # repr of a float keeps every bit, so that two runs can be compared for equality
        row |= {name: str(int(v)) if isinstance(v, int) else repr(float(v)) for name, v in values.items()}
        self.rows.append(row)
        new = [name for name in row if name not in self.columns]
        if new:
            self.columns += new
            self.csv_file.close()
            self._rewrite_csv()
        else:
            with disk_errors(self.csv_path):
                csv.DictWriter(self.csv_file, self.columns, restval="", lineterminator="\n").writerow(row)
                self.csv_file.flush()
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()
        if self.wandb:
            self.wandb.log(step, values)

    def samples(self, step, records):
        """Append dicts to samples.jsonl, one a line, each with its step."""
        with disk_errors(self.samples_path):
            for record in records:
                self.samples_file.write(json.dumps({"step": step} | plain(record) | {"step": step}) + "\n")
            self.samples_file.flush()

    def line(self, step, steps, metrics):
        """Print and return the step's line, under a heading every 20 lines."""
        cells = [f"{step}/{steps}".rjust(13)]
        cells += [short(metrics.get(metric)).rjust(max(8, len(name))) for name, metric in COLUMNS.items()]
        if self.lines % HEADING_EVERY == 0:
            print(" ".join(["step".rjust(13)] + [name.rjust(max(8, len(name))) for name in COLUMNS]))
        self.lines += 1
        line = " ".join(cells)
        print(line, flush=True)
        return line

    def close(self):
        self.csv_file.close()
        self.samples_file.close()
        if self.writer:
            self.writer.close()
        if self.wandb:
            self.wandb.close()
