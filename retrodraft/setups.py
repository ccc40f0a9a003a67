"""How a model is verified, for each state that it was met in: hooks and compiled parts come and go between calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from retrodraft.budget import Budget, cached_cost_curve
from retrodraft.capabilities import Capabilities, probe
from retrodraft.target import TargetModel, forward_kind

KEPT = 4  # newest states


@dataclass
class Setup:
    """What a call keeps from its beginning to its end, whatever other threads do to the model meanwhile."""

    kind: tuple[Any, ...]
    capabilities: Capabilities
    target: TargetModel
    budget: Budget | None = None  # the cost curve is measured when the first call needs it

    def prepare_budget(self, fixed: int | None) -> Budget:
        """The budget, made now if need be."""
        if self.budget is None:
            wanted = fixed is None and self.capabilities.mode in ("tree", "chain")
            self.budget = Budget(fixed, cached_cost_curve(self.target.model) if wanted else None)
        return self.budget


class Setups:
    """The newest setups of one model; a new state of it is probed."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: list[Setup] = []
        self.follow()

    @property
    def newest(self) -> Setup:
        """That of the last `follow`."""
        return self._kept[0]

    def follow(self) -> Setup:
        """The setup for the model as it is now."""
        kind = forward_kind(self._model)
        found = next((setup for setup in self._kept if setup.kind == kind), None)
        if found is None:
            found = Setup(kind, probe(self._model), TargetModel(self._model))
        self._kept = [found, *(setup for setup in self._kept if setup is not found)][:KEPT]
        return found

    def reset(self) -> None:
        """Forget the learned rates."""
        for setup in self._kept:
            if setup.budget is not None:
                setup.budget.reset()
