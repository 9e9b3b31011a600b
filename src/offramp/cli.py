"""The command line: plain typed functions. Heavy imports wait until a command runs, so `--help` answers at once."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from offramp import __version__
from offramp.errors import OfframpError

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell

ABOUT = "Transformers that spend only the compute an input needs."
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT)

Run = Annotated[str, typer.Argument(help="a folder that `offramp train` wrote")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="a setting as key=value; may be repeated")]
Columns = Annotated[list[str] | None, typer.Option("--column", help="rename a column: text=sentence; may be repeated")]
Budget = Annotated[float | None, typer.Option(help="share of the full model's compute, above 0 and at most 1")]
BatchSize = Annotated[int, typer.Option(min=1, help="rows in a batch")]
MaxLoss = Annotated[float | None, typer.Option(help="instead of a budget: what the metric may lose, e.g. 0.01")]
Risk = Annotated[float | None, typer.Option(help="instead of a budget: a risk that `calibrate --risk` has proven")]
Limit = Annotated[int | None, typer.Option(min=1, help="use only the first N rows")]
Engine = Annotated[str, typer.Option(help="how layers are executed")]
Json = Annotated[str | None, typer.Option("--json", help="write the result cell here")]


def _pairs(given: list[str] | None, flag: str) -> dict[str, str]:
    pairs = {}
    for item in given or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise OfframpError(f"{flag} key=value", repr(item), f"write it as {flag} name=value")
        pairs[key] = value
    return pairs


@app.command()
def train(
    *,
    model: Annotated[str, typer.Option(help="a model folder, a hub name, or `minilm` for the carried one")],
    train: Annotated[str, typer.Option(help="rows: .jsonl .csv .tsv .parquet (.gz), SQuAD .json, or a datasets name")],
    out: Annotated[str, typer.Option(help="where the run is written")],
    task: Annotated[str, typer.Option(help="classification, regression, tagging, span, masked_lm")] = "classification",
    method: Annotated[str, typer.Option(help="full, branchynet, deebert …")] = "full",
    dev: Annotated[str | None, typer.Option(help="rows to choose and calibrate on")] = None,
    dev_split: Annotated[float, typer.Option(help="share of the training rows held out when there is no --dev")] = 0.1,
    init: Annotated[str | None, typer.Option(help="start from the fine-tuned weights of this run")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="epochs of each stage")] = 3,
    batch_size: BatchSize = 32,
    lr: Annotated[float, typer.Option(help="learning rate of the pretrained part")] = 5e-5,
    max_length: Annotated[int | None, typer.Option(help="longest row in tokens")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first N training rows; --dev is whole")] = None,
    seed: Annotated[int, typer.Option(help="decides everything random")] = 42,
    precision: Annotated[str, typer.Option(help="auto, bf16 or fp32")] = "auto",
    save_seconds: Annotated[float, typer.Option(help="seconds between checkpoints")] = 120.0,
    column: Columns = None,
    set_: Sets = None,
    force: Annotated[bool, typer.Option("--force", help="replace what is in --out")] = False,
) -> None:
    """Fine-tune a model with off-ramps, calibrate it and write a model folder. Interrupted? Run the same again."""
    from offramp.study.console import TrainingConsole, summary
    from offramp.study.moviedata import carried_model
    from offramp.training import job as jobs
    from offramp.training.schedule import Schedule

    job = jobs.Job(
        model=carried_model() if model == "minilm" else model,
        train=train,
        out=out,
        task=task,
        method=method,
        dev=dev,
        dev_split=dev_split,
        init=init,
        max_length=max_length,
        limit=limit,
        columns=_pairs(column, "--column"),
        options=_pairs(set_, "--set"),
        schedule=Schedule(epochs, batch_size, lr, seed=seed, precision=precision, save_seconds=save_seconds),
    )
    with TrainingConsole(out, epochs) as console:
        finished = jobs.train(job, force, console.say)
    summary(finished, out)


@app.command("eval")
def evaluate(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows")],
    set_: Sets = None,
    budget: Budget = None,
    max_loss: MaxLoss = None,
    risk: Risk = None,
    batch_size: BatchSize = 32,
    engine: Engine = "torch",
    limit: Limit = None,
    column: Columns = None,
    json: Json = None,
) -> None:
    """Score a run on labelled rows: metrics, share of the full compute, where rows left."""
    from offramp.model.folder import read_recipe
    from offramp.model.predictor import Predictor
    from offramp.study import console
    from offramp.study import evaluate as study
    from offramp.text.read import read

    predictor = Predictor.load(run, engine)
    settings = predictor.settings(budget, _pairs(set_, "--set"), max_loss, risk)
    rows = read(data, columns=_pairs(column, "--column"), limit=limit)
    predictor.task.check(rows, data)
    origin = study.Origin(*study.place(data), command_line(), read_recipe(run))
    console.show_cell(study.evaluate(predictor, rows, settings, origin, batch_size), json)


@app.command()
def calibrate(
    run: Run,
    *,
    data: Annotated[str, typer.Option(help="labelled rows the model was not trained on")],
    budget: Budget = None,
    max_loss: MaxLoss = None,
    risk: Annotated[float | None, typer.Option(help="prove that at most so much departs from the full model")] = None,
    confidence: Annotated[float, typer.Option(help="with which the risk must hold")] = 0.95,
    limit: Limit = None,
    column: Columns = None,
) -> None:
    """Find settings for every budget on held-out rows; with --risk, settings that come with a guarantee."""
    from offramp.budget.recalibrate import recalibrate
    from offramp.study import console
    from offramp.text.read import read

    console.check_wish(budget, max_loss)
    rows = read(data, columns=_pairs(column, "--column"), limit=limit)
    console.show_points(recalibrate(run, rows, data, risk, confidence), budget, max_loss)


@app.command()
def predict(
    run: Run,
    *,
    input: Annotated[str, typer.Option(help="rows to answer, or - for standard input")],
    output: Annotated[str | None, typer.Option(help="a .jsonl file; standard output if left out")] = None,
    budget: Budget = None,
    max_loss: MaxLoss = None,
    risk: Risk = None,
    batch_size: BatchSize = 32,
    engine: Engine = "torch",
    column: Columns = None,
) -> None:
    """Answer rows in order, one JSON object a line."""
    from offramp.model.predictor import Predictor
    from offramp.study.stream import answer_stream

    predictor = Predictor.load(run, engine)
    asked = predictor.settings(budget, None, max_loss, risk)
    done = answer_stream(predictor, input, output, asked, batch_size, _pairs(column, "--column"))
    cut = f", {done.cut} truncated to {predictor.model.max_length} tokens" if done.cut else ""
    typer.echo(f"rows answered: {done.rows}, with {done.share:.3f} of the full compute{cut}", err=True)


@app.command()
def info(
    run: Annotated[str | None, typer.Argument(help="a folder that `offramp train` wrote")] = None,
    *,
    env: Annotated[bool, typer.Option("--env", help="versions and hardware instead")] = False,
) -> None:
    """What a run is and what it can do, or (--env) what this machine is."""
    from offramp.study import console

    if env:
        console.show_environment()
    elif run:
        console.show_run(run)
    else:
        raise OfframpError("something to describe", "no run and no --env", "offramp info RUN, or offramp info --env")


@app.command()
def baseline(
    *,
    train: Annotated[str, typer.Option(help="training rows")],
    data: Annotated[str, typer.Option(help="labelled rows to score")],
    limit: Annotated[int | None, typer.Option(min=1, help="only the first N training rows")] = None,
    column: Columns = None,
    json: Json = None,
) -> None:
    """What TF-IDF and logistic regression reach on the same rows, in milliseconds and without a Transformer."""
    from offramp.study import console
    from offramp.study.baselines import tfidf
    from offramp.text.read import read

    names = _pairs(column, "--column")
    rows = read(train, columns=names, limit=limit)
    console.show_cell(tfidf(rows, read(data, columns=names), (train, data), command_line()), json)


@app.command()
def demo(
    *,
    out: Annotated[str | None, typer.Option(help="the run folder (runs/demo, or runs/demo-quick with --quick)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer rows, under 90 seconds")] = False,
) -> None:
    """Fine-tune the carried MiniLM on movie-review sentences and show what a budget buys."""
    from offramp.study.demo import demo as show

    show(out or ("runs/demo-quick" if quick else "runs/demo"), quick)


@app.command()
def version() -> None:
    """The version."""
    typer.echo(__version__)


def command_line() -> str:
    """The command as typed, without the folders of this machine."""
    words = ("/".join(Path(word).parts[-2:]) if word.startswith("/") else word for word in sys.argv[1:])
    return " ".join(["offramp", *words])


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: bad input is one clear message and exit code 2, Ctrl-C is 130; anything else is a bug and shows."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            app(args=arguments, standalone_mode=True)
        except OfframpError as error:
            typer.secho("offramp: " + str(error).replace("\n", "\n         "), err=True, fg="red")
            raise SystemExit(2) from None
        except (KeyboardInterrupt, SystemExit) as stop:
            if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
                raise
            typer.echo("\nstopped; nothing that was complete is lost. Training goes on by the same command.", err=True)
            raise SystemExit(INTERRUPTED) from None


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Our own warnings in a line; the rest (deprecations in libraries) is not for users of commands."""
    if category is UserWarning:
        typer.secho(f"offramp: {message}", err=True, fg="yellow")


if __name__ == "__main__":  # accelerate launch --module offramp.cli train …
    main()
