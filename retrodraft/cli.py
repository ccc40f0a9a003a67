"""The command line. Commands import what they need, so that `retrodraft --help` stays quick."""

from __future__ import annotations

import sys

INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C ended

try:
    import errno
    import math
    import os
    import signal
    import tempfile
    from contextlib import suppress
    from pathlib import Path
    from typing import Annotated, Any, NoReturn

    import typer

    from retrodraft import __version__
    from retrodraft.commands import index, replay, serve, session
    from retrodraft.commands.documents import standard_input
    from retrodraft.commands.shared import Attn, Budget, Corpus, Dense, Device, Dtype, Model, Threads, load, wrap
    from retrodraft.options import STRATEGY_NAMES, check_temperature
except KeyboardInterrupt:  # most of a command's first moments; `main` is not there yet to catch it
    sys.exit(INTERRUPTED)

# Two OpenMP threads that spin on two cores stall each other as soon as anything else runs; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

app = typer.Typer(
    help="Hugging Face causal language models generate faster, with the same output, without training.",
    epilog="Exit codes: 0 done, 1 outputs differ, 2 bad input (one line on standard error says what), 130 interrupted.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(index.app, name="index")
app.add_typer(session.app, name="session")
app.command()(replay.replay)
app.command()(serve.serve)
UsageError: Any = typer.BadParameter.__base__  # what a mistyped option raises; typer has no name of its own for it

Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the sampling.")]
Strategy = Annotated[str, typer.Option(help=f"{STRATEGY_NAMES}.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"retrodraft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Hugging Face causal language models generate faster, with the same output, without training."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads standard input.")],
    model: Model = "embedded",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    attn: Attn = None,
    strategy: Strategy = "retro",
    budget: Budget = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above it samples.")] = 0.0,
    seed: Seed = 0,
    raw: Annotated[bool, typer.Option(help="Feed the prompt as it is, without the chat template.")] = False,
    corpus: Corpus = None,
    dense: Dense = False,
) -> None:
    """Stream the model's answer.

    Standard error then says what drafting saved.

    Example: retrodraft generate "Name three rivers, with a sentence on each." --max-new-tokens 100

    Example: head -30 src/main.py | retrodraft generate - --raw --corpus my.index
    """
    text = standard_input().read().decode(errors="surrogateescape") if prompt == "-" else prompt
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("the prompt is not UTF-8 text")
    if not text.strip():
        raise ValueError("the prompt is empty")
    check_temperature(temperature)
    rd, tokenizer = wrap(model, dtype, device, threads, attn, strategy, budget, corpus or [], dense)
    import torch
    from transformers import TextStreamer

    from retrodraft.workloads import render_prompt

    ids = tokenizer(text).input_ids if raw else render_prompt(tokenizer, [{"role": "user", "content": text}])
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    torch.manual_seed(seed)
    rd.generate(
        torch.tensor([ids], device=rd.model.device), max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True), **sampling,
    )  # fmt: skip
    typer.echo(str(rd.stats), err=True)


@app.command()
def demo(
    model: Model = "embedded",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 160,
) -> None:
    """Answer a built-in prompt, plain and drafted.

    Shows that the texts are equal, and the saving; exit code 1 if they differ.
    """
    rd, tokenizer = wrap(model, dtype, device, threads, None, "retro", "auto")
    from retrodraft.demo import run_demo

    raise typer.Exit(0 if run_demo(rd, tokenizer, max_new_tokens) else 1)


@app.command()
def bench(
    workload: Annotated[Path, typer.Option(help="jsonl of {id, category, messages}, or Spec-Bench's format.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for results.json, results.md, results.png.")],
    systems: Annotated[str, typer.Option(help=f"Of plain, hf-prompt-lookup, {STRATEGY_NAMES}; comma between.")] = (
        "plain,hf-prompt-lookup,prompt_lookup,token_recycling,suffix,goose,retro"
    ),
    model: Model = "embedded",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    attn: Attn = None,
    budget: Budget = "auto",
    limit: Annotated[int, typer.Option(min=0, help="Prompts, evenly spread over the file; 0 takes all.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out, and counted.")] = 4096,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above it samples, one seed for all.")] = 0.0,
    seed: Seed = 0,
    warm: Annotated[bool, typer.Option("--warm/--cold", help="Keep what was learned from prompt to prompt.")] = False,
    reproducible: Annotated[bool, typer.Option(help="Verify with one constant shape (see RetroDraft).")] = False,
    corpus: Corpus = None,
) -> None:
    """Run systems side by side on a workload.

    They are interleaved prompt by prompt, and every output is checked against plain generate's.

    A run that was killed goes on where it stopped when started again with the same arguments. In float32, exit code 1
    says that an output of a strategy differs from plain's by more than a near tie.

    Example: retrodraft bench --workload spec_bench.jsonl --systems plain,hf-prompt-lookup,retro --limit 20 -o results
    """
    from retrodraft.runs import BenchSettings
    from retrodraft.workloads import read_workload

    settings = BenchSettings(
        workload=str(workload), systems=[name.strip() for name in systems.split(",") if name.strip()], model=model,
        dtype=dtype, device=device, threads=threads, attn=attn, budget=budget, limit=limit,
        max_new_tokens=max_new_tokens, max_prompt_tokens=max_prompt_tokens, temperature=temperature, seed=seed,
        warm=warm, reproducible=reproducible, corpora=[str(path) for path in corpus or []],
    )  # fmt: skip
    read_workload(workload)
    from retrodraft.bench import run_bench

    raise typer.Exit(1 if run_bench(settings, output)["num_faults"] else 0)


@app.command()
def profile(
    output: Annotated[Path, typer.Option("-o", "--output", help="PNG of the curve; a .json goes beside it.")] = Path(
        "cost_curve.png"
    ),
    model: Model = "embedded",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    attn: Attn = None,
) -> None:
    """Measure a model, once and for good.

    What a verify forward costs by its number of tokens, and the rows of the hot start. Both are kept and used by every
    later run. The rows take a forward over the whole vocabulary, some minutes on a CPU; without this command only those
    of the first seconds are there.

    Example: retrodraft profile --dtype bfloat16
    """
    from retrodraft.plots import plot_cost_curve, require_matplotlib

    require_matplotlib()
    _check_figure(output)
    loaded, tokenizer = load(model, dtype, device, threads, attn)
    from dataclasses import asdict

    from rich.progress import Progress

    from retrodraft.budget import measure_cost_curve, store_cost_curve
    from retrodraft.capabilities import probe
    from retrodraft.folders import keep
    from retrodraft.hot_start import hot_rows
    from retrodraft.reports import print_cost_curve

    if probe(loaded).mode == "tree":
        with Progress(transient=True) as bar:
            task = bar.add_task("rows of the hot start", total=None)
            hot_rows(loaded, tokenizer, math.inf, lambda done, total: bar.update(task, completed=done, total=total))
    curve = measure_cost_curve(loaded)
    store_cost_curve(loaded, curve)
    print_cost_curve(curve)
    plot_cost_curve(curve, output)
    keep(output.with_suffix(".json"), asdict(curve))
    typer.echo(f"wrote {output} and {output.with_suffix('.json')} (for `retrodraft replay --profile`)")


def _check_figure(output: Path) -> None:
    """Raise ValueError where a figure and the .json beside it can't be written: before minutes of measuring."""
    if output.is_dir() or not output.parent.is_dir() or output.suffix == ".json":
        raise ValueError(f"output must be a .png file in a folder that exists; got {str(output)!r}")
    try:
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise ValueError(f"output {str(output)!r} can't be written: {error.strerror or error}") from error


def main() -> None:
    """Run the command line; bad input is one line on standard error and exit code 2, Ctrl-C is quiet and 130."""
    try:
        # typer itself would print the usage, three lines long, above the line that matters
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        _stop()
    except Exception as error:
        if _caused_by_interrupt(error):
            _stop()
        if isinstance(error, UsageError):
            if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands named alone: the message is its help
                typer.echo(error.format_message())
                sys.exit(0)
            _fail(error.format_message(), 2)
        if isinstance(error, ValueError):
            _fail(str(error) or repr(error), 2)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _fail(f"{error.filename or 'standard output'}: {error.strerror}", 2)
        raise
    if code == INTERRUPTED:  # how newer versions of typer report it
        _stop()
    sys.exit(code)


def _caused_by_interrupt(error: BaseException | None) -> bool:
    """Whether it began as Ctrl-C: a class or a module that is interrupted in the making may raise something else."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _stop() -> NoReturn:
    """End as Ctrl-C asks; pressed again it ends the process at once, not with errors of modules half taken down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(INTERRUPTED)


def _fail(message: str, code: int) -> NoReturn:
    with suppress(OSError):  # standard error may be full; the code says it too
        typer.echo(f"retrodraft: {message.splitlines()[0]}", err=True)
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by whoever began the process
            continue
        try:
            stream.flush()
        except OSError:  # Python would try once more at the end, and exit with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
