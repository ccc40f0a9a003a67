"""Building one corpus on many machines, with Dask.

Shards are independent, so building is a map over groups of files, and joining them writes one manifest. Dask is the
engine because the same few lines run on a laptop's processes and on a cluster's workers, and because it is plain Python
to install. The output folder has to be one that all workers see.
"""

from __future__ import annotations

import heapq
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from retrodraft.index.corpus import CorpusIndex
from retrodraft.index.files import FoundFile, find_files
from retrodraft.index.fingerprint import tokenizer_facts
from retrodraft.index.ingest import IngestReport, read_texts, tokenize
from retrodraft.index.storage import check_outside


def build_distributed(
    paths: Sequence[Path | str],
    output: Path | str,
    load_tokenizer: Callable[[], Any],
    *,
    num_parts: int,
    text_field: str | None = None,
    role: str | None = None,
    **find_options: Any,
) -> tuple[CorpusIndex, IngestReport]:
    """Index files in `num_parts` tasks, and join the parts to one corpus in the folder `output`.

    Runs on the current `distributed.Client` if there is one, else on this machine's processes. Parts lie beside the
    output until they are joined, and are removed in any case. Warns where the corpus has more shards than drafts are
    taken from.

    Args:
        load_tokenizer: called in each task; has to be picklable.
        num_parts: tasks, which get about equally many bytes; each becomes one shard (or more, from 2**31 tokens on).
        text_field, role: as in `retrodraft.index.ingest.read_texts`.
        find_options: `include`, `exclude` and `gitignore` of `retrodraft.index.files.find_files`.

    Raises:
        ValueError: nothing to index, a path does not exist, or the output lies in a store.
        ImportError: Dask is not installed.
    """
    try:
        import dask
    except ImportError as error:
        raise ImportError("building with Dask needs it: pip install 'retrodraft[distributed]'") from error

    if isinstance(paths, (str, Path)):
        raise ValueError(f"paths must be a list of files and folders, got {paths!r}; put it into one")
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    check_outside(output)
    report = IngestReport()
    groups = _balanced(find_files(paths, report.skipped, **find_options), num_parts)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    parts = Path(tempfile.mkdtemp(prefix=f"{Path(output).name}.parts-", dir=Path(output).parent))
    try:
        tasks = [
            dask.delayed(_build_part)(group, parts / str(number), load_tokenizer, text_field, role)
            for number, group in enumerate(groups)
        ]
        for part in _compute(tasks):
            report.num_bytes += part.num_bytes
            report.num_documents += part.num_documents
            report.num_tokens += part.num_tokens
            report.skipped += part.skipped
        if report.num_documents == 0:
            raise ValueError(f"nothing to index in {', '.join(map(str, paths))}: no text was found")
        options = {"paths": [str(path) for path in paths], "field": text_field, "role": role, **find_options}
        corpus = CorpusIndex.merge([parts / str(number) for number in range(len(groups))], output, options=options)
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    if corpus.advice:
        warnings.warn(f"{corpus.path}: {corpus.advice}", stacklevel=2)
    return corpus, report


def _build_part(
    files: list[FoundFile], folder: Path, load_tokenizer: Callable[[], Any], text_field: str | None, role: str | None
) -> IngestReport:
    report = IngestReport()
    tokenizer = load_tokenizer()
    texts = read_texts(files, report, text_field=text_field, role=role)
    CorpusIndex.build(tokenize(texts, tokenizer, report), folder, tokenizer=tokenizer_facts(tokenizer))
    return report


def _compute(tasks: list[Any]) -> list[IngestReport]:
    """Results in order, from the current client's workers or from processes of this machine."""
    import dask

    try:
        from distributed import get_client

        get_client()
    except (ImportError, ValueError):
        return list(dask.compute(*tasks, scheduler="processes"))
    return list(dask.compute(*tasks))


def _balanced(files: list[FoundFile], num_parts: int) -> list[list[FoundFile]]:
    """Split files into groups of about equal size: the largest first, each to the group that has least."""
    groups: list[list[FoundFile]] = [[] for _ in range(num_parts)]
    heap = [(0, number) for number in range(num_parts)]
    for file in sorted(files, key=lambda file: -file.size):
        size, number = heapq.heappop(heap)
        groups[number].append(file)
        heapq.heappush(heap, (size + file.size, number))
    return [group for group in groups if group]
