"""`draftsmith generate`: the target's own answers to the prompts of a dataset, as data to train on."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.files import file_digest, write_json
from ..data.formats import RowError
from ..data.loading import load_sources
from ..data.prepare import BadRowsError, listing
from ..data.questions import QuestionSet
from ..data.wording import counted
from ..generation import (
    DATA_FILE,
    DECIDED_LAST,
    JOURNAL_FILE,
    PROVENANCE_FILE,
    AnswerReader,
    Counts,
    Engine,
    Journal,
    Sampling,
    ServerEngine,
    answer_all,
    local_engine,
    refuse_other_settings,
    write_dataset,
)
from ..model_card import Source
from ..model_card.run_record import library_versions
from ..revisions import commit_of
from ..serving.launching import sigterm_raises
from ..serving.servers import Server, ServerError
from .arguments import TargetArguments
from .cached_sources import target_identity
from .generate_arguments import GenerateArguments
from .parsing import UsageError, parse, usage_errors


logger = logging.getLogger(__name__)

HOPELESS = 16  # rows without an answer, and none with one: the next ones will have none either
EARLY = 50  # conversations, after which a run of mostly cut answers is said to be one
MOSTLY_CUT = (
    "%d of the first %d conversations were cut at `max_new_tokens` %d, and `cut_answers=drop` leaves cut answers out. "
    "Stop and allow longer ones in another `output_dir`, or go on: `cut_answers` may still be changed at the end."
)


def main(argv: Sequence[str] | None = None) -> Counts | None:
    """Answer, write the dataset and return its counts; None if it was there already."""
    target_args, args = parse((TargetArguments, GenerateArguments), argv)
    directory = Path(args.output_dir)
    with _faults_as_usage_errors(), ExitStack() as stack:
        with usage_errors():
            tokenizer = target_args.load_tokenizer()
            if tokenizer.chat_template is None:
                raise ValueError(f"`target`: {target_args.target} has no chat template to render prompts with.")
            reader = AnswerReader(tokenizer, args.chat_template_kwargs)
            server = args.server() if args.engine == "openai" else None
            sampling = args.sampling(target_args.generation_config())
            settings = _settings(target_args, args, tokenizer, sampling, server)
            questions = _questions(args)
            if _is_finished(directory, settings, questions):
                print(f"{directory} is finished already.")
                return None
            directory.mkdir(parents=True, exist_ok=True)
            journal = stack.enter_context(Journal(directory / JOURNAL_FILE, settings))
            _refuse_strangers(journal, questions)
        if len(journal.places) < len(questions):
            stack.enter_context(sigterm_raises())
            engine = stack.enter_context(closing(_engine(target_args, args, reader, sampling, server)))
            _answer(questions, journal, engine, args)
        with usage_errors():
            (directory / PROVENANCE_FILE).unlink(missing_ok=True)  # it tells of what is written anew
            keep_cut, template_kwargs = args.cut_answers == "keep", args.chat_template_kwargs
            counts = write_dataset(directory, questions, journal, keep_cut=keep_cut, template_kwargs=template_kwargs)
        _write_provenance(directory, settings, questions, journal, counts)
        if not counts.cut:  # else `cut_answers` may still be decided otherwise
            journal.path.unlink()
    _print_summary(directory, counts)
    return counts


def _answer(questions: QuestionSet, journal: Journal, engine: Engine, args: GenerateArguments) -> None:
    """Answer what the journal lacks.

    Raises:
        UsageError: at the end, rows got no answer, unless they are skipped; at once, none gets any.
        KeyboardInterrupt: with how far it came.
    """
    failures: list[str] = []
    try:
        _answer_missing(questions, journal, engine, failures, args)
    except KeyboardInterrupt as interrupt:
        done, total = len(journal.places), counted(len(questions), "conversation")
        raise KeyboardInterrupt(f"after {done:,} of {total}: the same command goes on") from interrupt
    if failures and args.on_bad_row == "error":
        raise UsageError(
            f"{counted(len(failures), 'row')} got no answer ({len(journal.places)} did, and are kept; run the command "
            f"again to try the others once more, or with `on_bad_row=skip` to leave them out):\n{listing(failures)}"
        )
    if failures:
        logger.warning("Left out %s without an answer:\n%s", counted(len(failures), "row"), listing(failures))


def _answer_missing(
    questions: QuestionSet, journal: Journal, engine: Engine, failures: list[str], args: GenerateArguments
) -> None:
    """Fill the journal, and `failures` with the rows that got no answer."""
    missing = (index for index, key in enumerate(questions.keys) if key not in journal.places)
    earlier = journal.new_tokens
    ends: list[bool] = []
    with tqdm(total=len(questions), initial=len(journal.places), unit="conversation") as progress:
        for index, answered in answer_all(questions, missing, engine):
            if isinstance(answered, RowError):
                failures.append(f"{questions.locate(index)}: {answered}")
                if len(failures) >= HOPELESS and not journal.places:
                    raise UsageError(f"The first {HOPELESS} rows got no answer:\n{listing(failures)}")
                continue
            journal.add(answered)
            progress.update()
            ends.append(answered.finished)
            if len(ends) == EARLY and 2 * sum(ends) < EARLY and args.cut_answers == "drop":
                logger.warning(MOSTLY_CUT, EARLY - sum(ends), EARLY, args.max_new_tokens)
            rate = (journal.new_tokens - earlier) / max(progress.format_dict["elapsed"], 1e-9)
            progress.set_postfix_str(f"{rate:,.0f} tokens/s" + (f", {len(failures)} failed" if failures else ""))


def _engine(
    target_args: TargetArguments,
    args: GenerateArguments,
    reader: AnswerReader,
    sampling: Sampling,
    server: Server | None,
) -> Engine:
    if server is not None:
        return ServerEngine(
            server,
            sampling,
            reader=reader,
            concurrency=args.concurrency,
            timeout=args.request_timeout,
            max_retries=args.max_retries,
            requests_per_minute=args.requests_per_minute,
        )
    model: Any = target_args.load()
    if torch.cuda.is_available() and model.device.type == "cpu":
        model.to("cuda")
    continuous = args.continuous_batching
    return local_engine(
        model,
        reader.tokenizer,
        sampling,
        args.chat_template_kwargs,
        batch_size=args.batch_size,
        continuous_batching=model.device.type == "cuda" if continuous is None else continuous,
    )


def _questions(args: GenerateArguments) -> QuestionSet:
    questions = QuestionSet(
        load_sources(args.dataset, config=args.dataset_config, split=args.split), args.prompt_column
    )
    if questions.errors and args.on_bad_row == "error":
        raise BadRowsError(questions.errors, len(questions))
    if questions.errors:
        rows = counted(len(questions.errors), "row")
        logger.warning("Skipped %s that can't be used:\n%s", rows, listing(questions.errors))
    if not questions.keys:
        raise ValueError(f"`dataset`: {', '.join(args.dataset)} holds no row.")
    return questions


def _settings(
    target_args: TargetArguments,
    args: GenerateArguments,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    server: Server | None,
) -> dict[str, Any]:
    """What decides the answers and what is kept of them; no path, no address, no key."""
    config = target_args.config()
    revision = commit_of(config) or target_args.target_revision
    fields = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    contents = json.dumps([fields, tokenizer.get_chat_template()], sort_keys=True, default=str).encode()
    return {
        "target": target_identity(target_args, revision),
        "target_config_and_template": hashlib.blake2b(contents, digest_size=8).hexdigest(),
        "target_dtype": target_args.target_dtype if server is None else None,
        "engine": args.engine,
        "served_model": None if server is None else Source.of(server.model).name,
        "sampling": asdict(sampling),
        "chat_template_kwargs": args.chat_template_kwargs,
        "cut_answers": args.cut_answers,
    }


def _is_finished(directory: Path, settings: dict[str, Any], questions: QuestionSet) -> bool:
    """Whether the dataset is there, of these settings and these prompts; raises `ValueError` for any other.

    With another `cut_answers` it is written anew from the journal, which is kept where answers were cut.
    """
    path, data, journal = (directory / name for name in (PROVENANCE_FILE, DATA_FILE, JOURNAL_FILE))
    if not path.is_file() and data.exists() and not journal.exists():
        raise ValueError(f"`output_dir`: {directory} holds a {DATA_FILE} of something else: name another.")
    if not path.is_file() or not data.is_file():
        return False
    try:
        provenance = json.loads(path.read_text(encoding="utf-8"))
        before = provenance["settings"] | {"dataset": provenance["prompts"]["digest"]}
        written, cut = provenance["digest"], provenance["counts"]["cut"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"`output_dir`: {path} can't be read ({error!r}): remove it, or name another.") from error
    is_other_cut = cut > 0 and before.get("cut_answers") != settings["cut_answers"]
    but_for = DECIDED_LAST if not cut or journal.exists() else ()  # then it decides nothing, or can be decided anew
    refuse_other_settings(before, settings | {"dataset": _digest(questions)}, directory, but_for=but_for)
    if _digest_of(data) != written:
        raise ValueError(
            f"`output_dir`: {data} is damaged or changed, it is not what {path.name} tells of: remove both to answer "
            "anew, or name another."
        )
    if not cut:
        journal.unlink(missing_ok=True)  # of a run that was killed after its last file
    return not is_other_cut


def _digest_of(data: Path) -> str:
    return file_digest(data, hashlib.blake2b(digest_size=16))


def _refuse_strangers(journal: Journal, questions: QuestionSet) -> None:
    if strangers := len(journal.places.keys() - set(questions.keys)):
        raise ValueError(
            f"`dataset` lacks {counted(strangers, 'conversation')} answered in {journal.path.parent}. Pass the "
            "dataset that the run began with, or name another `output_dir`."
        )


def _digest(questions: QuestionSet) -> str:
    return hashlib.blake2b("\n".join(questions.keys).encode(), digest_size=16).hexdigest()


def _write_provenance(
    directory: Path, settings: dict[str, Any], questions: QuestionSet, journal: Journal, counts: Counts
) -> None:
    tokens = {"prompt": journal.prompt_tokens, "new": journal.new_tokens}
    prompts = {"sources": [Source.of(source.name).name for source in questions.sources], "digest": _digest(questions)}
    provenance = {
        "settings": settings,
        "prompts": prompts,
        "counts": asdict(counts),
        "digest": _digest_of(directory / DATA_FILE),
        "tokens": tokens,
        "seconds": round(journal.seconds, 1),
        "versions": library_versions(),
    }
    write_json(provenance, directory / PROVENANCE_FILE)


def _print_summary(directory: Path, counts: Counts) -> None:
    rows, answers = counted(counts.rows, "conversation"), counted(counts.answers, "answer")
    print(f"{directory / DATA_FILE}: {counts.written:,} of {rows}, {answers}")
    if counts.cut:
        cut = counted(counts.cut, "conversation")
        print(f"{cut} had an answer cut at `max_new_tokens`: `cut_answers` drops or keeps it, also afterwards")
    if counts.unanswered:
        print(f"{counted(counts.unanswered, 'conversation')} left out, without an answer to train on: see above")
    if counts.shortened:
        shortened = counted(counts.shortened, "conversation")
        print(f"{shortened} ended early: after a cut, or before results of tool calls not made")
    print(f"Train on it with `draftsmith train --dataset {directory}`.")


@contextmanager
def _faults_as_usage_errors() -> Iterator[None]:
    try:
        yield
    except (ServerError, OSError) as error:  # a server that is away, a full disk: what was answered is kept
        raise UsageError(str(error)) from error
