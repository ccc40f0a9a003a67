"""Building and asking a corpus index, beside REST's `draftretriever`, on the same tokens in the same run.

    pip install -r benchmarks/requirements-suffix_array.txt
    python benchmarks/suffix_array.py --tokens 20000000 -o results.json

The corpus is the text of the Python installation (standard library and installed packages); one file in twenty is held
out for the contexts that are looked up. Sorting and writing run on one core, tokenising on all. Where draftretriever is
not installed its columns are left out. Last come texts that are hard to sort or to read, and by how much more than four
times as long building takes when they become four times as large (1 is linear).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.index.corpus import CorpusIndex, Document
from retrodraft.index.files import find_files
from retrodraft.index.ingest import IngestReport, Text, read_texts, tokenize
from retrodraft.kernels import suffix_array as kernel
from retrodraft.kernels.suffix_sorting import suffix_array

PATTERNS = ("*.py", "*.pyi", "*.h", "*.hpp", "*.c", "*.md", "*.rst", "*.txt")
Int32 = npt.NDArray[np.int32]


def collect(folders: list[str], tokenizer: Any, limit: int) -> tuple[list[Document], list[Document], dict[str, float]]:
    """Documents of `limit` tokens, held-out documents beside them, and what tokenising cost."""
    report = IngestReport()
    files = find_files(folders, report.skipped, include=PATTERNS, gitignore=False)
    np.random.default_rng(0).shuffle(files)
    kept: list[Document] = []
    held: list[Document] = []
    size = 0
    start = time.perf_counter()
    for number, document in enumerate(tokenize(read_texts(files, report), tokenizer, report, dedup=True)):
        if number % 20 == 0:
            held.append(document)
            continue
        kept.append(Document(np.asarray(document.token_ids)[: limit - size], document.name))
        size += len(kept[-1].token_ids)
        if size >= limit:
            break
    seconds = time.perf_counter() - start
    return kept, held, {"seconds": seconds, "tokens_per_second": report.num_tokens / seconds}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and tails in microseconds."""
    p50, p90, p99 = np.percentile(np.array(seconds) * 1e6, [50, 90, 99])
    return {"p50_us": float(p50), "p90_us": float(p90), "p99_us": float(p99)}


def time_each(function: Callable[[Any], Any], arguments: list[Any]) -> dict[str, float]:
    for argument in arguments[:200]:
        function(argument)
    return spread([timed(lambda argument=argument: function(argument))[0] for argument in arguments])  # type: ignore[misc]


def peak_bytes(tokens: Path, folder: Path) -> float:
    """Bytes a token that building adds to the peak memory of a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", str(tokens), str(folder)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def build_alone(tokens: Path, folder: Path) -> None:
    """In a process of its own: build from a file that is read piecewise, print the growth of the peak (Linux)."""
    CorpusIndex.build([[1, 2, 3]], folder)
    size = tokens.stat().st_size // 4

    def documents() -> Iterator[Int32]:
        for start in range(0, size, 4000):
            yield np.fromfile(tokens, np.int32, min(4000, size - start), offset=4 * start)

    before = memory("VmRSS")
    CorpusIndex.build(documents(), folder)
    print((memory("VmHWM") - before) / size)


def memory(line: str) -> int:
    """Bytes of this process, as Linux counts them; `ru_maxrss` would begin at the parent's."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{line}:")[1].split()[0])


def ours(documents: list[Document], held: Int32, folder: Path) -> dict[str, Any]:
    flat = np.concatenate([np.append(document.token_ids, -1) for document in documents]).astype(np.int32)[::-1].copy()
    order = np.empty(len(flat), np.int32)
    suffix_array(flat[:1000].copy(), order[:1000])
    CorpusIndex.build(documents[:2], folder)
    sort_seconds, _ = timed(lambda: suffix_array(flat, order))
    build_seconds, corpus = timed(lambda: CorpusIndex.build(documents, folder))
    rng = np.random.default_rng(1)
    places = rng.integers(kernel.MAX_MATCH, len(held), 20_000)
    fresh = [held[place - 16 : place].copy() for place in places]
    tails = [held[place - 64 : place] for place in range(1000, 21_000)]
    tokens, counts = np.empty(8, np.int32), np.empty(8, np.int32)
    (shard,) = corpus.arrays
    return {
        "sort_tokens_per_second": corpus.num_tokens / sort_seconds,
        "build_seconds": build_seconds,
        "build_us_per_token": 1e6 * build_seconds / corpus.num_tokens,
        "bytes_per_token": corpus.nbytes / corpus.num_tokens,
        "open_seconds": min(timed(lambda: CorpusIndex.open(folder))[0] for _ in range(5)),
        "lookup_16_top_8": time_each(
            lambda context: kernel.corpus_candidates(*shard, context, 16, tokens, counts), fresh
        ),
        "step_64_top_8": time_each(
            lambda context: kernel.corpus_candidates(*shard, context, 64, tokens, counts), tails
        ),
        "public_match_and_continuations": time_each(
            lambda context: corpus.continuations(corpus.match(context)), fresh[:5000]
        ),
    }  # fmt: skip


def worst_cases(tokenizer: Any, folder: Path) -> dict[str, dict[str, float]]:
    """Building time of hard texts; the line is tokenised as well."""
    rng = np.random.default_rng(2)
    file = rng.integers(0, 40_000, 4000).astype(np.int32)

    def fibonacci(size: int) -> Int32:
        shorter, longer = np.zeros(1, np.int32), np.array([0, 1], np.int32)
        while len(longer) < size:
            shorter, longer = longer, np.concatenate([longer, shorter])
        return longer[:size]

    def line(size: int) -> Iterator[Document]:
        text = ",".join(map(str, rng.integers(0, 10**6, size // 6).tolist()))[:size]
        yield from tokenize([Text("line", text)], tokenizer, IngestReport())

    cases: dict[str, tuple[Callable[[int], Any], int]] = {
        "one token again and again": (lambda size: [np.zeros(size, np.int32)], 4_000_000),
        "Fibonacci word": (lambda size: [fibonacci(size)], 4_000_000),
        "one line of 5 MB": (line, 5_000_000),
        "1,000 equal files of 4,000 tokens": (lambda size: [file] * size, 1000),
        "2,000,000 documents of 3 tokens": (lambda size: list(file[:3000].reshape(-1, 3)) * (size // 1000), 2_000_000),
    }
    found = {}
    for name, (make, size) in cases.items():
        quarter, whole = (
            min(timed(lambda: CorpusIndex.build(make(n), folder))[0] for _ in range(2))  # noqa: B023
            for n in (size // 4, size)
        )
        corpus = CorpusIndex.open(folder)
        found[name] = {
            "build_seconds": whole, "build_us_per_token": 1e6 * whole / corpus.num_tokens, "growth": whole / quarter / 4
        }  # fmt: skip
    return found


def rest(documents: list[Document], held: Int32, file: Path) -> dict[str, Any]:
    import draftretriever

    num_tokens = sum(len(document.token_ids) for document in documents)
    lists = [np.asarray(document.token_ids).tolist() for document in documents]

    def build() -> None:
        writer = draftretriever.Writer(str(file), vocab_size=65_536)
        for entry in lists:
            writer.add_entry(entry)
        writer.finalize()

    build_seconds, _ = timed(build)
    load_seconds, reader = timed(lambda: draftretriever.Reader(str(file)))
    places = np.random.default_rng(1).integers(kernel.MAX_MATCH, len(held), 2000)

    def search(context: list[int]) -> None:
        for length in range(16, 1, -1):  # as REST shortens the context until something is found
            if reader.search(context[16 - length :], k=5000, choices=64, long=10)[0]:
                return

    return {
        "build_seconds": build_seconds,
        "build_us_per_token": 1e6 * build_seconds / num_tokens,
        "bytes_per_token": file.stat().st_size / num_tokens,
        "load_seconds": load_seconds,
        "search_k_5000_choices_64": time_each(search, [held[place - 16 : place].tolist() for place in places]),
    }


def main() -> None:
    """Collect, build twice, ask, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", default=[sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")])
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--tokenizer", default="embedded")
    parser.add_argument("-o", "--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    from retrodraft.models import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer)
    documents, held_documents, tokenising = collect(options.folders, tokenizer, options.tokens)
    held = np.concatenate([np.asarray(document.token_ids) for document in held_documents]).astype(np.int32)
    num_tokens = sum(len(document.token_ids) for document in documents)
    results: dict[str, Any] = {"num_tokens": num_tokens, "num_documents": len(documents), "tokenising": tokenising}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results["retrodraft"] = ours(documents, held, folder / "a.index")
        np.concatenate([document.token_ids for document in documents]).astype(np.int32).tofile(folder / "tokens")
        results["retrodraft"]["peak_bytes_per_token"] = peak_bytes(folder / "tokens", folder / "b.index")
        if importlib.util.find_spec("draftretriever"):
            results["draftretriever"] = rest(documents, held, folder / "rest.idx")
        del documents
        results["worst_cases"] = worst_cases(tokenizer, folder / "c.index")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        build_alone(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
