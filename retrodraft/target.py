"""The target model: one forward over a batch of draft trees, and what is read from it.

A forward leaves `attention_mask` out, passes each node's position, and hooks the mask builders that every transformers
model calls (`kernels.tree_attention`), so no modelling file is forked and no model name is known here.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import masking_utils

from retrodraft.cache import DraftCache
from retrodraft.compat import cache_arg
from retrodraft.fastest_linear import fastest_linear
from retrodraft.kernels import top_logits as kernel
from retrodraft.kernels.few_rows import Form
from retrodraft.kernels.tree_attention import PrefixMask, TreeLayout, grouped_attention, tree_mask_function
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree

HARVEST_CHUNK = 128  # prompt positions whose logits are held at once
HARVEST_LIMIT = 2048  # newest prompt tokens whose logits are read at most
HARVEST_SHARE = 1 / 2  # of the weights that decoding reads: what the output head may cost on the prompt

_local = threading.local()  # of the verify forward a thread is in: .layout, its trees; .linear_forms and their .dtype
_hooks_lock = threading.Lock()
_hooks_held = 0
_stood_in: list[tuple[Any, str, Any, Any]] = []  # registry, name, the function there, what stands in for it
_LOOP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample")
_NEUTRAL = ("retrodraft.", "transformers.utils.")  # modules whose hooks look on and change nothing
_BEYOND_MASKS = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")  # that attention may take


def _tree_mask(plain: Any) -> Any:
    """A mask builder that behaves as `plain` outside a tree forward."""

    def build(*args: Any, **kwargs: Any) -> Any:
        layout: TreeLayout | None = getattr(_local, "layout", None)
        if layout is None or kwargs.get("q_length") != layout.num_nodes:
            return plain(*args, **kwargs)
        causal = kwargs["mask_function"] is masking_utils.causal_mask_function and not kwargs["kv_offset"]
        if causal and layout.prefix_mask is not None:
            return layout.prefix_mask.cut(layout.ancestors[0], layout.length, kwargs["kv_length"])
        kwargs["mask_function"] = tree_mask_function(layout, kwargs["mask_function"], kwargs["q_offset"])
        kwargs["allow_is_causal_skip"] = False
        return plain(*args, **kwargs)

    return build


def _tree_attention(plain: Any) -> Any:
    """An attention function that behaves as `plain` where it is not about a tree."""

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **kwargs: Any
    ) -> Any:
        layout: TreeLayout | None = getattr(_local, "layout", None)
        if (
            layout is None or attention_mask is None or attention_mask.shape[1] != 1
            or query.shape[2] != layout.num_nodes or kwargs.get("dropout")
            or any(kwargs.get(name) is not None for name in _BEYOND_MASKS)
        ):  # fmt: skip
            return plain(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return grouped_attention(layout, query, key, value, attention_mask, scaling), None

    return attend


def _tree_linear(plain: Any) -> Any:
    """A linear layer that behaves as `plain` but in verify forwards where another form is faster.

    It is called hundreds of times a forward, so the checks are few and the likeliest to fail come first. Gradients and
    autocast may be switched on inside a forward; what torch compiles it arranges itself.
    """
    parameter, strided = torch.nn.Parameter, torch.strided

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return plain(input, weight, bias)
        forms: dict[Any, Form] | None = getattr(_local, "linear_forms", None)
        form = forms.get(weight.shape) if forms else None
        if (
            form is not None and type(weight) is parameter and type(input) is torch.Tensor
            and input.dtype is weight.dtype is _local.dtype and input.is_cpu and weight.is_cpu
            and weight.layout is strided and weight.is_contiguous() and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu") and not _is_intercepted()
        ):  # fmt: skip
            return form(input, weight, bias)
        return plain(input, weight, bias)

    return linear


def _is_intercepted() -> bool:
    """Whether a mode or a transform of torch's (`FlopCounterMode`, `vmap`) is to see every operation."""
    functions, dispatch = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return functions > 0 or dispatch > 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _stand_in(registry: dict[str, Any], name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of a registered function in its place, until the hooks go."""
    plain = registry[name]
    registry[name] = make(plain)
    _stood_in.append((registry, name, plain, registry[name]))


@contextlib.contextmanager
def tree_hooks() -> Iterator[None]:
    """Let masks, attention and linear layers know of the thread's trees; nested and concurrent uses share one set."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # loaded with every model; slow to load alone

    global _hooks_held
    with _hooks_lock:
        _hooks_held += 1
        if _hooks_held == 1:
            for name in ("sdpa", "eager", "flex_attention"):
                _stand_in(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, name, _tree_mask)
            _stand_in(ALL_ATTENTION_FUNCTIONS, "sdpa", _tree_attention)
            _stand_in(vars(torch.nn.functional), "linear", _tree_linear)
    try:
        yield
    finally:
        with _hooks_lock:
            _hooks_held -= 1
            if _hooks_held == 0:
                for registry, name, plain, ours in _stood_in:
                    if registry[name] is ours:  # else somebody has put something over it, which goes on with ours
                        registry[name] = plain
                _stood_in.clear()


def forward_kind(model: Any) -> tuple[Any, ...]:
    """What decides how a model can be verified: attention implementation, dtype, device, and `own_parts`."""
    return model.config._attn_implementation, model.dtype, model.device, own_parts(model)


def own_parts(model: Any) -> tuple[Any, ...]:
    """What makes a model another one than its class: compiled parts; forwards, loop methods and hooks of its own."""
    everywhere = torch.nn.modules.module
    parts = [*everywhere._global_forward_pre_hooks.values(), *everywhere._global_forward_hooks.values()]
    parts += [method for name in _LOOP_METHODS if not home(method := getattr(model, name)).startswith("transformers.")]
    for module in model.modules():
        if not type(module).__module__.startswith(("transformers.", "torch.nn.")):
            parts.append(type(module))
        if module._compiled_call_impl is not None:
            parts.append(module._compiled_call_impl)
        if "forward" in vars(module):
            parts.append(module.forward)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            parts += [hook for hook in hooks.values() if not home(hook).startswith(_NEUTRAL)]
    return tuple(parts)


def home(function: Any) -> str:
    """Name of the module that a function or method was written in."""
    return str(getattr(getattr(function, "func", function), "__module__", None))  # of a partial, its function's


def weights_state(model: Any) -> int:
    """A number that changes with the weights, as far as that can be told without reading them: also with an adapter."""
    state: list[Any] = [id(module) for module in model.modules()]
    for parameter in model.parameters():  # and not buffers: dynamic RoPE puts new ones there as it goes
        version = 0 if parameter.is_inference() else parameter._version
        try:
            state.append((version, parameter.data_ptr(), parameter.requires_grad))
        except RuntimeError:  # a tensor without storage of its own
            state.append((version, 0, parameter.requires_grad))
    return hash(tuple(state))


def takes_positions(model: Any) -> bool:
    """Whether a forward of the model can be told positions; `generate` then tells them."""
    return "position_ids" in inspect.signature(model.forward).parameters


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Inside, no part of the model is in training mode; those that were are again afterwards."""
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


class TargetModel:
    """A causal language model seen as a verifier of draft trees."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._cache_arg = cache_arg(model)
        self._takes_positions = takes_positions(model)
        self._implementation: str = model.config._attn_implementation
        self._linear_forms = fastest_linear(model)
        dtype = model.dtype
        if self._implementation == "eager":
            self._mask_values = (torch.zeros((), dtype=dtype), torch.tensor(torch.finfo(dtype).min, dtype=dtype))
        else:
            self._mask_values = torch.tensor(True), torch.tensor(False)

    def prefix_mask(self) -> PrefixMask:
        """A fresh buffer for the full-attention masks of one row."""
        visible, hidden = self._mask_values
        return PrefixMask(visible.to(self.model.device), hidden.to(self.model.device))

    def verify(
        self,
        trees: list[DraftTree],
        cache: DraftCache,
        prefix_mask: PrefixMask | None = None,
        min_nodes: int = 1,
        aligned: bool = False,
        **forward_kwargs: Any,
    ) -> Any:
        """One forward over a tree for each row; its nodes lie behind the cache's committed tokens until `commit`.

        Shorter trees are padded with unseen nodes to the longest, or to `min_nodes`. `aligned` rounds the slots that
        attention runs over as well. Returns the model's output, logits [batch_size, num_nodes, vocab_size].
        """
        nodes = max(min_nodes, max(len(tree) for tree in trees))
        device = self.model.device
        token_ids = torch.zeros(len(trees), nodes, dtype=torch.long, device="cpu")
        for row, tree in enumerate(trees):
            token_ids[row, : len(tree)] = torch.from_numpy(tree.token_ids)
        layout = None
        if nodes > 1 or len(trees) > 1 or device.type == "cpu":  # where one token without a mask is attended to slowly
            layout = self._layout(trees, nodes, cache, prefix_mask)
            positions = layout.position_ids
        else:
            positions = torch.tensor([cache.lengths], device=device)
        kwargs: dict[str, Any] = {"input_ids": token_ids.to(device), self._cache_arg: cache, "use_cache": True}
        if self._takes_positions:
            kwargs["position_ids"] = positions
        cache.stage(aligned=aligned and layout is not None)
        _local.layout, _local.dtype = layout, self._linear_forms.dtype
        _local.linear_forms = self._linear_forms.at(len(trees) * nodes)
        try:
            return self.model(**kwargs, **forward_kwargs, return_dict=True)
        finally:
            _local.layout = _local.linear_forms = None
            if layout is not None and layout.prefix_mask is not None:
                layout.prefix_mask.clear(cache.lengths[0], nodes)

    def _layout(
        self, trees: list[DraftTree], nodes: int, cache: DraftCache, prefix_mask: PrefixMask | None
    ) -> TreeLayout:
        depths = torch.zeros(len(trees), nodes, dtype=torch.long, device="cpu")
        ancestors = torch.zeros(len(trees), nodes, nodes, dtype=torch.bool, device="cpu")
        for row, tree in enumerate(trees):
            count = len(tree)
            depths[row, :count] = torch.from_numpy(tree.depths)
            ancestors[row, :count, :count] = torch.from_numpy(tree.ancestor_mask())
            ancestors[row, range(count, nodes), range(count, nodes)] = True  # a padding node sees itself, no NaN
        device = self.model.device
        lengths = torch.tensor(cache.lengths, device=device)
        mask = prefix_mask if len(trees) == 1 else None
        return TreeLayout(lengths, depths.to(device), ancestors.to(device), cache.lengths[0], mask)


def top_logits(logits: torch.Tensor, k: int) -> TopLogits:
    """The `k` best entries of each row of `logits` [num_positions, vocab_size], with softmax probabilities.

    The first is the one that `argmax` names: of equal logits, the lowest id.
    """
    k = min(k, logits.shape[-1])
    if logits.device.type == "cpu":
        token_ids, probs = np.empty((len(logits), k), np.int32), np.empty((len(logits), k), np.float32)
        if logits.dtype == torch.bfloat16:
            kernel.top_bfloat16_logits(logits.detach().contiguous().view(torch.int16).numpy(), token_ids, probs)
        else:
            kernel.top_logits(logits.detach().contiguous().float().numpy(), token_ids, probs)
        return TopLogits(token_ids, probs)
    return _top_on_device(logits.float(), k)


def _top_on_device(logits: torch.Tensor, k: int) -> TopLogits:
    """`top_logits` by torch's own kernels and one transfer to the host. `topk` may order equal logits anyhow."""
    values, indices = logits.topk(k, dim=-1)
    probs = (values - logits.logsumexp(-1, keepdim=True)).exp()
    packed = torch.cat([logits.argmax(-1, keepdim=True).int(), indices.int(), probs.view(torch.int32)], -1)
    columns = packed.cpu().numpy()
    first, token_ids = columns[:, :1], columns[:, 1 : k + 1]
    token_ids = np.where(token_ids == first, token_ids[:, :1], token_ids)
    token_ids[:, :1] = first
    return TopLogits(token_ids, np.ascontiguousarray(columns[:, k + 1 :]).view(np.float32))


class PromptHarvest:
    """What the target says after each token of the prompt, read from the prefill that happens anyway.

    A hook keeps the decoder's last hidden states; the output head is then applied a chunk at a time, so that the
    [prompt, vocabulary] matrix never exists. Logit scaling outside the head changes no ranking and is left out.
    """

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        self._head: Any = head if isinstance(getattr(head, "weight", None), torch.Tensor) else None  # else it is packed
        self._decoder = getattr(model, model.base_model_prefix, None)
        self._hidden: torch.Tensor | None = None
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        head_size = 1 if self._head is None else max(self._head.weight.numel(), 1)
        self._per_token = HARVEST_SHARE * num_parameters / head_size

    def worthwhile(self, new_tokens: int) -> int:
        """Prompt positions whose logits are worth reading for so many new tokens.

        On a small model the head is a fifth of all weights; two positions for each new token were paid for by 1 to 3 %
        fewer forwards.
        """
        return min(int(self._per_token * new_tokens), HARVEST_LIMIT)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Keep the hidden states of the forwards inside."""
        if self._head is None or self._decoder is None or not isinstance(self._decoder, torch.nn.Module):
            yield
            return

        own = threading.get_ident()

        def keep(module: Any, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return  # a compiled forward is not harvested: it would be broken in two here, or refused (fullgraph)
            if threading.get_ident() != own:
                return  # another thread's forward on the same model
            self._hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)

        handle = self._decoder.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def read(self, row: int, count: int, k: int) -> TopLogits | None:
        """Top `k` after each of the last `count` tokens of a row (fewer where the last forward held fewer)."""
        if self._hidden is None:
            return None
        hidden = self._hidden[row, max(self._hidden.shape[1] - count, 0) :]
        if not len(hidden) or hidden.shape[-1] != self._head.weight.shape[-1]:
            return None
        parts = [top_logits(self._head(chunk), k) for chunk in hidden.split(HARVEST_CHUNK)]
        ids, probs = zip(*((part.token_ids, part.probs) for part in parts), strict=True)
        return TopLogits(np.concatenate(ids), np.concatenate(probs))
