"""Tiny random-weight models of many families, and a planted draft, for tests of exactness."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB = 97
WINDOW = 8
_SMALL = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, bos_token_id=1,
    eos_token_id=None,
)  # fmt: skip
_GPT2 = dict(
    vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3, pad_token_id=0,
    bos_token_id=1, eos_token_id=None,
)  # fmt: skip
_MIXED = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)

# name -> (model type, changes to the small configuration, attention implementations)
BOTH, EAGER = ("sdpa", "eager"), ("eager",)
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, BOTH),
    "mistral_sliding": ("mistral", dict(sliding_window=WINDOW), BOTH),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2), BOTH),
    "qwen2": ("qwen2", {}, BOTH),
    "qwen2_mixed": ("qwen2", dict(use_sliding_window=True, max_window_layers=1, **_MIXED), BOTH),
    "qwen3": ("qwen3", dict(head_dim=16), BOTH),
    "qwen3_moe": ("qwen3_moe", dict(head_dim=16, **_MOE), BOTH),
    "gemma": ("gemma", dict(head_dim=16), BOTH),
    "gemma2": ("gemma2", dict(head_dim=16, **_MIXED), EAGER),
    "gemma3": ("gemma3_text", dict(head_dim=16, **_MIXED), BOTH),
    "gpt2": ("gpt2", _GPT2, BOTH),
    "gpt_neox": ("gpt_neox", {}, BOTH),
    "gptj": ("gptj", dict(**_GPT2, rotary_dim=8), EAGER),
    "opt": ("opt", dict(ffn_dim=96, word_embed_proj_dim=64), BOTH),
    "phi": ("phi", {}, BOTH),
    "phi3_sliding": ("phi3", dict(sliding_window=WINDOW), BOTH),
    "falcon_rope": ("falcon", dict(alibi=False, new_decoder_architecture=True, num_kv_heads=2), BOTH),
    "gpt_oss": ("gpt_oss", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, **_MIXED), EAGER),
    "granite": ("granite", {}, BOTH),
    "olmo2": ("olmo2", {}, BOTH),
    "cohere2": ("cohere2", dict(head_dim=16, **_MIXED), BOTH),
    "starcoder2_sliding": ("starcoder2", dict(sliding_window=WINDOW), BOTH),
    "stablelm": ("stablelm", {}, BOTH),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0]), BOTH),
    "olmo3": ("olmo3", _MIXED, BOTH),
    "deepseek_v3": (
        "deepseek_v3",
        dict(
            q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4,
            n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=48, first_k_dense_replace=1,
            num_key_value_heads=4,
        ),
        BOTH,
    ),
    "llama4": (
        "llama4_text",
        dict(
            head_dim=16, attention_chunk_size=WINDOW, num_local_experts=2, num_experts_per_tok=1,
            intermediate_size_mlp=96, layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
            attn_temperature_tuning=False,
        ),
        BOTH,
    ),
    # Families that can't verify a tree: ALiBi is biased by cache slot, recurrent states can't branch.
    "bloom": ("bloom", dict(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3,
                            pad_token_id=0, eos_token_id=None), EAGER),
    "mpt": ("mpt", dict(vocab_size=VOCAB, d_model=64, n_layers=2, n_heads=4, expansion_ratio=2, max_seq_len=512,
                        use_cache=True, initializer_range=0.3, eos_token_id=None), EAGER),
    "falcon_alibi": ("falcon", dict(alibi=True, new_decoder_architecture=False, multi_query=True), EAGER),
    "mamba2": ("mamba2", dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16,
                              state_size=16, n_groups=2, chunk_size=8, eos_token_id=None, pad_token_id=0), EAGER),
    "qwen3_next": ("qwen3_next", dict(
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=48, **_MOE), BOTH),
    "lfm2": ("lfm2", dict(layer_types=["conv", "full_attention"], block_ff_dim=96), BOTH),
}  # fmt: skip


def tiny(family: str, attn: str | None = None, seed: int = 0) -> Any:
    """A tiny random model of a family in float32 and eval mode."""
    kind, changes, implementations = FAMILIES[family]
    settings = changes if "vocab_size" in changes else {**_SMALL, **changes}
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn or implementations[0])
    return model.eval()


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """Model A of the tests: attention matters, so a fault of cache, mask or positions shows in the logits."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**_SMALL, **changes})).eval()


def rigged_llama(successor: list[int]) -> Any:
    """Model R of the tests: the next token is exactly `successor[last token]`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**{**_SMALL, "hidden_size": 128, "vocab_size": len(successor), "pad_token_id": None})
    ).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = model.model.embed_tokens.weight
        embeddings.copy_(embeddings / embeddings.norm(dim=-1, keepdim=True))
        model.lm_head.weight.zero_()
        for token, following in enumerate(successor):
            model.lm_head.weight[following] += 10 * embeddings[token]
    return model


def random_prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """int64 [1, length] of ids from 2 on."""
    return torch.randint(2, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


def copy_prompt(length: int = 30, seed: int = 0) -> torch.Tensor:
    """A prompt with much repetition, so that drafting has something to work with."""
    block = random_prompt(max(length // 3, 1), seed)
    return block.repeat(1, math.ceil(length / block.shape[1]))[:, :length]


class PlantedStrategy:
    """A strategy that drafts what it was told: the text that plain decoding gave, on a tree with wrong siblings.

    `wrong` are the positions of the text at which the right token is withheld: any acceptance pattern can be forced.
    """

    proposers = {1: "planted"}
    top_k = 0

    def __init__(self, texts: list[list[int]], depth: int = 6, wrong: Any = (), width: int = 2) -> None:
        self.texts, self.depth, self.wrong, self.width = texts, depth, set(wrong), width
        self._next_row = 0

    def row(self) -> Any:
        """The next planted text's row."""
        row = _PlantedRow(self, self.texts[self._next_row % len(self.texts)])
        self._next_row += 1
        return row

    def reset(self) -> None:
        """Nothing is learned."""


class _PlantedRow:
    def __init__(self, shared: PlantedStrategy, text: list[int]) -> None:
        self._shared, self._text, self._position = shared, text, -1

    def begin(self, token_ids: Any, top: Any) -> None:
        self._position = -1

    def draft(self, prices: Any, max_depth: int, chain: bool) -> Any:
        from retrodraft.tree import DraftTree

        tokens: list[int] = []
        parents: list[int] = []
        parent = 0
        for step in range(1, 1 + min(self._shared.depth, max_depth)):
            place = self._position + step
            if place >= len(self._text):
                break
            right = self._text[place]
            siblings = [] if chain else [(right + 1 + i) % VOCAB for i in range(self._shared.width - 1)]
            offered = [*siblings, *([] if place in self._shared.wrong else [right])]
            if chain and place in self._shared.wrong:
                offered = [(right + 1) % VOCAB]
            for token in offered:
                if len(tokens) + 1 >= len(prices):
                    break
                tokens.append(token)
                parents.append(parent)
                if token == right or (chain and token == offered[-1]):
                    following = len(tokens)
            if not offered or place in self._shared.wrong or len(tokens) + 1 >= len(prices):
                break
            parent = following
        return DraftTree.from_nodes(self._root(), tokens, parents)

    def _root(self) -> int:
        return self._text[self._position]

    def commit(self, tree: Any, path: list[int], token_ids: Any, top: Any) -> None:
        self._position += len(token_ids)


def planted(model: Any, texts: list[list[int]], **options: Any) -> Any:
    """A RetroDraft on `model` that drafts the planted texts."""
    from retrodraft import RetroDraft

    rd = RetroDraft(model, budget=options.pop("budget", 24))
    rd.strategy = PlantedStrategy(texts, **options)
    return rd


def looking_on(hook: Any) -> Any:
    """A hook that changes nothing, and says so: a model with others is probed anew."""
    hook.__module__ = "retrodraft.tests"
    return hook


class ForwardCount:
    """Counts the target's forwards while it is entered."""

    def __init__(self, model: Any) -> None:
        self.model, self.count, self.tokens = model, 0, 0

    def __enter__(self) -> ForwardCount:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self.count += 1
            ids = kwargs.get("input_ids")
            self.tokens += ids.shape[1] if ids is not None else 0

        self._handle = self.model.register_forward_pre_hook(looking_on(hook), with_kwargs=True)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._handle.remove()


def max_difference(a: Any, b: Any) -> float:
    """Largest absolute difference over two tuples of tensors of one length."""
    assert len(a) == len(b)
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True))


def repetitive(rng: np.random.Generator, length: int, alphabet: int) -> list[int]:
    """A random text over a small alphabet with copied stretches."""
    text = rng.integers(0, alphabet, max(length // 2, 1)).tolist()
    while len(text) < length:
        start = int(rng.integers(0, len(text)))
        text += text[start : start + int(rng.integers(1, 12))]
    return text[:length]
