"""Draft heads trained under one recipe with one choice changed at a time, and decoded on prompts held out (GPU).

Every arm (`heads_arms`) is one `draftsmith train` by the recipe's `train` section with the arm's flags over it, then
one `draftsmith evaluate` by its `evaluate` section, of which most arms take the first number of draft tokens and
temperature alone. `--jobs` runs go on at once, dealt over the visible GPUs; their seconds are then no measurement of
speed. `--save-points` keeps heads on the way and decodes them, too: a learning curve. `seconds` are the trainer's,
saving included, preparation of data not. Of tokens seen, the supervised share is that of all data. A run that is in
the results already, with the same flags and data, is not made again; failed ones are. Arms that train as the recipe
does are the recipe.

`--decode-only` decodes heads made elsewhere instead: with `--peer` they are the save points of one training, each in a
directory whose name ends in its step, and the JSON has rows with `step`, `tokens`, `supervised` and `seconds`.
"""

import argparse
import json
import os
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
import yaml
from tqdm.auto import tqdm

from .common import OUTPUT, ROOT, Results, line, make_parser
from .heads_arms import ALL_ARMS, ARMS, PEER, RECIPE, check_evaluation, distinct, parsed_arms
from .heads_runs import Experiment, Failed, Row, Training, decoded_curve, digest_of, step_of, without_counts


DECIDED_HERE = {"target", "dataset", "output_dir", "resume_from_checkpoint", "draft", "prompts", "output"}
PATHS = {"target", "data", "output_dir"}  # settings of the peer that are of no other machine
DRY_TRAINING = {"max_steps": 2, "max_length": 128, "row_length": 128}
DRY_DECODING = {"num_prompts": 2, "max_new_tokens": 4}
HEADER = ("arm", "seed", "tokens", "seconds", "acceptance length")
WIDTHS = (22, 6, 14, 9)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    experiment = set_up(args)
    try:
        parsed = parsed_arms(ALL_ARMS, {**experiment.train, **experiment.target}, experiment.directory / "arms")
        check_evaluation({**experiment.evaluate, **experiment.target}, experiment.directory / "arms")
    except ValueError as error:
        raise SystemExit(str(error)) from error
    distinct_arms, alike = distinct(ALL_ARMS, parsed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {"recipe": experiment.train, "evaluation": experiment.evaluate, "data": experiment.data, "alike": alike}
    output = experiment.directory / args.output.name if args.dry_run else args.output
    results = Results(output, device, **settings)
    if results.path.exists():
        results.rows.extend(json.loads(results.path.read_text())["rows"])
    print(line(HEADER[:4], WIDTHS, 1), HEADER[4], sep="  ", flush=True)
    if args.decode_only:
        try:
            for row in decode_only(experiment, args.decode_only, args.peer):
                keep(results, row)
        except Failed as failed:
            raise SystemExit(str(failed)) from failed
        return
    names = {arm.name for arm in ALL_ARMS} if args.arms == ["all"] else set(args.arms)
    wanted = {alike.get(name, name) for name in names}
    trainings = [Training(experiment, arm, seed) for seed in args.seeds for arm in distinct_arms if arm.name in wanted]
    todo = [training for training in trainings if not any(training.is_in(row) for row in results.rows)]
    print(f"{len(todo)} of {len(trainings)} trainings to run", flush=True)
    for row in run_all(todo, args.jobs, time.monotonic() + args.time_limit):
        keep(results, row)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("heads", __doc__, OUTPUT / "heads.json")
    parser.add_argument("--target", help="Hub id or directory (default: the recipe's)")
    parser.add_argument("--answers", type=Path, required=True, help="the target's own: JSON Lines, or of `generate`")
    parser.add_argument("--held-out", type=Path, nargs="+", required=True, help="JSON Lines of prompts, a set each")
    parser.add_argument("--recipe", type=Path, default=ROOT / "configs" / "recipe.yaml")
    parser.add_argument("--arms", nargs="+", default=[RECIPE.name], choices=["all", *ARMS], metavar="ARM",
                        help=f"all, or of {', '.join(ARMS)} (default: the recipe alone)")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, also of --decode-only")
    parser.add_argument("--save-points", type=int, default=0, help="heads kept and decoded on the way, at least 2")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "heads", help="of heads and logs")
    parser.add_argument(
        "--decode-only", type=Path, nargs="+", default=[], help="heads to decode, in place of training"
    )
    parser.add_argument("--peer", type=Path, help="JSON of the training of those heads, which are its save points")
    args = parser.parse_args(arguments)
    if args.jobs < 1 or args.save_points < 0 or args.save_points == 1:
        parser.error("`--jobs` is at least 1, and `--save-points` at least 2, or 0 for none")
    if missing := [str(path) for path in [args.answers, args.recipe, *args.held_out] if not path.exists()]:
        parser.error(f"{', '.join(missing)}: no such file")
    if args.peer and not args.decode_only:
        parser.error("`--peer` says how the heads of `--decode-only` were trained: name them")
    return args


def set_up(args: argparse.Namespace) -> Experiment:
    """Read the recipe, and write the held-out prompts as sets that are counted apart."""
    recipe = yaml.safe_load(args.recipe.read_text())
    if missing := [name for name in ("train", "evaluate") if not isinstance(recipe.get(name), dict)]:
        raise SystemExit(f"`--recipe` {args.recipe} lacks the section {missing[0]!r}")
    train = {name: value for name, value in recipe["train"].items() if not is_decided_here(name)}
    evaluate = {name: value for name, value in recipe["evaluate"].items() if not is_decided_here(name)}
    target = {name: value for name, value in recipe.items() if name.startswith("target")}
    if args.target is not None:
        target = {"target": args.target}
    if args.dry_run:
        train, evaluate = {**train, **DRY_TRAINING}, {**evaluate, **DRY_DECODING}
    directory = args.directory.absolute()
    files = [args.answers]
    if args.answers.is_dir():
        files = sorted(path for path in args.answers.rglob("*") if path.is_file())
    prompts = write_sets(args.held_out, directory / "held_out")
    data, answers = digest_of([*files, *prompts]), args.answers.absolute()
    return Experiment(directory, target, train, evaluate, answers, data, prompts, args.save_points, args.jobs)


def is_decided_here(name: str) -> bool:
    return name in DECIDED_HERE or name.startswith(("save_", "push_to_hub", "hub_"))


def write_sets(files: Sequence[Path], directory: Path) -> list[Path]:
    """Copies whose rows have the name of their file as `category`: `draftsmith evaluate` counts by that."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for path in files:
        rows = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
        written.append(directory / f"{path.stem}.jsonl")
        written[-1].write_text("".join(json.dumps({**row, "category": path.stem}) + "\n" for row in rows))
    return written


def visible_gpus() -> list[str | None]:
    """As CUDA_VISIBLE_DEVICES names them; one None where there are none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    return list(found) if torch.cuda.is_available() else [None]


def dealt(jobs: int, gpus: Sequence[str | None]) -> list[str | None]:
    """The GPU of each job that runs at once."""
    return [gpus[job % len(gpus)] for job in range(jobs)]


def run_all(trainings: Sequence[Training], jobs: int, deadline: float) -> Iterator[Row]:
    """A row of each training, as they end; of those that are not begun by the deadline, none."""
    free: queue.Queue[str | None] = queue.Queue()
    for gpu in dealt(jobs, visible_gpus()):
        free.put(gpu)

    def run(training: Training) -> Row | None:
        gpu = free.get()
        try:
            return row_of(training, gpu) if time.monotonic() < deadline else None
        finally:
            free.put(gpu)

    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = [pool.submit(run, training) for training in trainings]
        for future in tqdm(as_completed(waiting), total=len(waiting), desc="trainings"):
            if (row := future.result()) is not None:
                yield row
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C begins none of those that wait


def row_of(training: Training, gpu: str | None) -> Row:
    try:
        return {**training.names(), "status": "ok", **training.measure(gpu)}
    except Failed as failed:
        return {**training.names(), "status": "failed", "reason": str(failed)}


def decode_only(experiment: Experiment, heads: Sequence[Path], peer: Path | None) -> Iterator[Row]:
    """A row of each head; of a peer's save points one row, with their curve."""
    gpu, place = visible_gpus()[0], experiment.directory / "decode_only"
    shared = {"seed": 0, "data": experiment.data, "evaluation": experiment.evaluate, "status": "ok"}
    if peer is None:
        for head in heads:
            first, *others = experiment.decode(head.absolute(), place / f"{head.name}.json", gpu)
            names = {"arm": head.name, "axis": "decoded"}
            yield {**names, **shared, "sets": first["sets"], "others": without_counts(others), "curve": []}
        return
    content = json.loads(peer.read_text())
    figures = {row["step"]: {**seen(row), "supervised_tokens": row["supervised"]} for row in content["rows"]}
    heads = sorted(heads, key=step_of)
    if unknown := [str(head) for head in heads if step_of(head) not in figures]:
        raise SystemExit(f"`--peer` {peer} has no figures of {', '.join(unknown)}, but of steps {list(figures)}")
    first, *others = experiment.decode(heads[-1].absolute(), place / f"{heads[-1].name}.json", gpu)
    curve = list(decoded_curve(experiment, heads, step_of(heads[-1]), first, place, gpu, figures))
    flags = {name: value for name, value in content["settings"].items() if name not in PATHS}
    trained = {"arm": peer_name(flags), "axis": PEER, "flags": flags, "jobs": experiment.jobs}
    yield {**trained, **shared, **curve[-1], "sets": first["sets"], "others": without_counts(others), "curve": curve}


def peer_name(flags: Row) -> str:
    norm = ", fc_norm" if flags.get("fc_norm") else ""
    return f"specforge, {flags['learning_rate']:g}, batch {flags['batch_size']}{norm}"


def seen(row: Row) -> Row:
    return {name: row[name] for name in ("tokens", "seconds", "compile_seconds")}


def keep(results: Results, row: Row) -> None:
    """In place of an earlier row of the same run; and print it."""
    results.rows[:] = [other for other in results.rows if (other["arm"], other["seed"]) != (row["arm"], row["seed"])]
    results.add(row)
    if row["status"] != "ok":
        tqdm.write(f"{row['arm']}, seed {row['seed']}: {row['reason']}")
        return
    lengths = "  ".join(f"{name} {counts['acceptance_length']:.3f}" for name, counts in row["sets"].items())
    tokens, seconds = (f"{row[name]:,.0f}" if name in row else "" for name in ("tokens", "seconds"))
    tqdm.write(f"{line((row['arm'], str(row['seed']), tokens, seconds), WIDTHS, 1)}  {lengths}")
