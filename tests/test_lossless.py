"""Output equals plain `generate`, token for token in float32, and takes fewer forwards."""

from __future__ import annotations

import pytest
import torch
from exactness import TOKENS, check_equal, clear_prompt, plain, text_of
from tiny import FAMILIES, VOCAB, ForwardCount, copy_prompt, planted, rigged_llama, tiny, tiny_llama

from retrodraft import RetroDraft
from retrodraft.compat import CACHE_ARG
from retrodraft.strategy import STRATEGIES

EXPECTED_MODE = dict.fromkeys(FAMILIES, "tree") | {
    "bloom": "chain", "mpt": "chain", "falcon_alibi": "chain",
    "mamba2": "snapshot", "qwen3_next": "snapshot", "lfm2": "snapshot",
}  # fmt: skip
PAIRS = [(seed, prompt) for seed in (0, 2, 4) for prompt in (0, 1, 2, 3)]  # models x prompts


@pytest.mark.parametrize("family,attn", [(f, a) for f, (_, _, kinds) in FAMILIES.items() for a in kinds])
def test_every_family(family: str, attn: str) -> None:
    """Trees with gaps in the accepted paths, over window edges, on every family and attention implementation."""
    model = tiny(family, attn)
    prompt = clear_prompt(model, 21)
    reference = plain(model, prompt)
    rd = planted(model, [text_of(reference, prompt)], wrong=(3, 4, 11, 20, 21, 22))
    assert rd.capabilities.mode == EXPECTED_MODE[family]
    out = check_equal(rd, prompt, reference)
    if family != "mamba2":
        assert out[CACHE_ARG].get_seq_length() == prompt.shape[1] + TOKENS - 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", [0, 2, 4])
def test_every_strategy(strategy: str, seed: int) -> None:
    """The real drafters, cold and warm."""
    model = tiny_llama(seed, initializer_range=0.05)
    rd = RetroDraft(model, strategy=strategy, budget=24)
    for length in (24, 60):
        prompt = clear_prompt(model, length, seed, copy_prompt, max_new_tokens=60)
        reference = plain(model, prompt, max_new_tokens=60)
        for _ in range(2):
            check_equal(rd, prompt, reference, max_new_tokens=60)


@pytest.mark.parametrize("seed,prompt_seed", PAIRS)
def test_accepting_none_one_some_and_all(seed: int, prompt_seed: int) -> None:
    """O07: exactly 0, 1, k-1 and k tokens a round, and 0 and k in turn; prompts of 1 and 2 tokens too."""
    model = tiny_llama(seed)
    prompt = clear_prompt(model, (1, 2, 5, 24)[prompt_seed], prompt_seed)
    reference = plain(model, prompt)
    text = text_of(reference, prompt)
    patterns = {
        "one": range(2, TOKENS, 3), "most": range(6, TOKENS, 6), "all": (), "in turn": [*range(5, 9), *range(18, 22)]
    }  # fmt: skip
    for wrong in patterns.values():
        rd = planted(model, [text], wrong=wrong, depth=6)
        out = check_equal(rd, prompt, reference, tolerance=1e-4)
        assert out[CACHE_ARG].get_seq_length() == prompt.shape[1] + TOKENS - 1
    rd = planted(model, [text], wrong=range(TOKENS), width=3)  # nothing is ever accepted
    assert rd.generate(prompt, max_new_tokens=TOKENS, do_sample=False).tolist() == reference.sequences.tolist()
    assert rd.stats.num_accepted_tokens == 0 and rd.stats.num_draft_tokens > 0


@pytest.mark.parametrize("new", [1, 2, 3, 15, 16, 17])
def test_near_the_context_window(new: int) -> None:
    """O04: learned positions end at 40; the tree must not reach beyond what is left."""
    model = tiny("gpt2")
    model.config.n_positions = 40
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:40].detach().clone())
    prompt = clear_prompt(model, 24, max_new_tokens=17)
    reference = plain(model, prompt, max_new_tokens=17)
    rd = planted(model, [text_of(reference, prompt)], depth=8, width=3)
    out = rd.generate(prompt, max_new_tokens=new, do_sample=False)
    assert out.tolist() == reference.sequences[:, : 24 + new].tolist()
    assert new < 4 or rd.stats.num_target_forwards < new


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma3", "gpt2", "llama4", "opt", "qwen3_moe"])
@pytest.mark.parametrize("pad", [0, 5])
def test_ragged_batch(family: str, pad: int) -> None:
    """O09: left-padded rows accept different numbers of tokens; each equals its own single run."""
    model = tiny(family)
    prompts = [clear_prompt(model, length, seed) for seed, length in enumerate((9, 24, 17, 3))]
    single = [plain(model, p, max_new_tokens=30) for p in prompts]
    texts = [text_of(ref, p) for ref, p in zip(single, prompts, strict=True)]
    width = max(p.shape[1] for p in prompts)
    ids, mask = torch.full((4, width), pad), torch.zeros(4, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.shape[1] :] = prompt
        mask[row, width - prompt.shape[1] :] = 1
    eos = texts[1][11]
    options = dict(attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=eos, pad_token_id=0)
    expected = model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    rd = planted(model, texts, wrong=(2, 9, 10))
    with ForwardCount(model) as forwards:
        out = rd.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert forwards.count < 20 < out.sequences.shape[1] - width
    for row, text in enumerate(texts):
        stop = text.index(eos) + 1 if eos in text else len(text)
        assert out.sequences[row, width:][:stop].tolist() == text[:stop]
        for step in range(stop):
            assert float((out.logits[step][row] - single[row].logits[step][0]).abs().max()) < 1e-3


def test_num_return_sequences_and_greedy_batch() -> None:
    """Equal rows without padding, and rows of one prompt."""
    model = tiny_llama(0)
    prompt = clear_prompt(model, 20, 0, copy_prompt).repeat(3, 1)
    reference = model.generate(prompt, max_new_tokens=30, do_sample=False)
    rd = RetroDraft(model, budget=20)
    assert rd.generate(prompt, max_new_tokens=30, do_sample=False).tolist() == reference.tolist()
    assert rd.stats.num_target_forwards < 30
    out = rd.generate(prompt[:1], max_new_tokens=30, do_sample=True, num_return_sequences=4, temperature=0.5)
    assert out.shape == (4, 50)


def test_rigged_model_follows_its_cycle() -> None:
    """Model R: the next token is known, so the statistics are too."""
    cycle = list(range(10, 20))
    successor = list(range(VOCAB))
    for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        successor[a] = b
    model = rigged_llama(successor)
    prompt = torch.tensor([cycle + cycle[:3]])
    rd = RetroDraft(model, budget=16)
    out = rd.generate(prompt, max_new_tokens=60, do_sample=False)
    assert out[0, 13:].tolist() == [cycle[(3 + i) % 10] for i in range(60)]
    assert rd.stats.num_target_forwards <= 8
    assert rd.stats.num_new_tokens == 60
    assert rd.stats.tokens_per_forward == 60 / rd.stats.num_row_forwards
    assert sum(rd.stats.acceptance_histogram.values()) == rd.stats.num_drafts


def test_low_precision_differs_only_at_near_ties() -> None:
    """O08: in bfloat16 a first difference must lie at a margin that rounding explains."""
    model = tiny_llama(0, initializer_range=0.05).to(torch.bfloat16)
    rd = RetroDraft(model, budget=16)
    saved = 0
    for seed in range(12):
        prompt = copy_prompt(24, seed)
        reference = plain(model, prompt)
        out = rd.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
        saved += TOKENS - rd.stats.num_target_forwards
        different = (out != reference.sequences)[0].nonzero()
        if len(different):
            top = reference.logits[int(different[0]) - 24][0].topk(2).values
            assert float(top[0] - top[1]) <= 2e-2
    assert saved > 0
