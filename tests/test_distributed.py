"""Building in tasks gives the corpus that building at once gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import Client, LocalCluster
from tokenizers import Tokenizer, models, pre_tokenizers

from retrodraft.index import CorpusIndex
from retrodraft.index.distributed import build_distributed


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    root = tmp_path / "sources"
    root.mkdir()
    for number in range(20):
        (root / f"{number}.txt").write_text(f"file {number}: the same words\n" * (number + 1))
    (root / "image.png").write_bytes(b"\0\0")
    return root


def test_parts_are_joined(sources: Path, tmp_path: Path) -> None:
    corpus, report = build_distributed([sources], tmp_path / "out", byte_tokenizer, num_parts=3)
    assert len(corpus.arrays) == 3 and corpus.num_documents == report.num_documents == 20
    assert corpus.num_tokens == report.num_tokens == sum(path.stat().st_size for path in sources.glob("*.txt"))
    assert [Path(item.name).name for item in report.skipped] == ["image.png"]
    sizes = [len(tokens) for tokens, _, _ in corpus.arrays]
    assert max(sizes) < 1.3 * min(sizes)
    assert corpus.find(list(byte_tokenizer().encode("the same").ids)).count == 210
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "sources"]
    assert corpus.info["options"] == {"paths": [str(sources)], "field": None, "role": None}
    CorpusIndex.open(tmp_path / "out", check=True)


def test_on_a_cluster(sources: Path, tmp_path: Path) -> None:
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        with Client(cluster):
            corpus, _ = build_distributed([sources], tmp_path / "out", byte_tokenizer, num_parts=4)
    assert len(corpus.arrays) == 4 and corpus.num_documents == 20


def test_more_parts_than_drafts_are_taken_from(sources: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"out: 17 shards are more than the 16 .*`retrodraft index compact .*out`"):
        build_distributed([sources], tmp_path / "out", byte_tokenizer, num_parts=17)


def test_nothing_and_bad_numbers(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="nothing to index"):
        build_distributed([tmp_path / "empty"], tmp_path / "out", byte_tokenizer, num_parts=2)
    with pytest.raises(ValueError, match="num_parts"):
        build_distributed([tmp_path], tmp_path / "out", byte_tokenizer, num_parts=0)
    with pytest.raises(ValueError, match="must be a list"):
        build_distributed(str(tmp_path), tmp_path / "out", byte_tokenizer, num_parts=1)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    (tmp_path / "empty" / "a.txt").write_text("text")
    names = sorted(path.name for path in CorpusIndex.build([[1]], tmp_path / "store").path.iterdir())
    with pytest.raises(ValueError, match="lies in the store"):
        build_distributed([tmp_path / "empty"], tmp_path / "store" / "out", byte_tokenizer, num_parts=1)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == names
