"""``initialize_parallel_optimizer``: an optimizer over the caller's own groups, whose step sums and clips first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from nxdt_core.protocols.optimizer import ParameterGroup
from nxdt_plugin_nxd_core.arguments import binds, check, expect, refused
from nxdt_plugin_nxd_core.config import NxDConfig, config_of, current_config
from nxdt_plugin_nxd_core.errors import NotOfThisModel
from nxdt_plugin_nxd_core.model import NxDModel
from nxdt_plugin_nxd_core.tags import load_checkpoint, restore, save_checkpoint

_CALL = "initialize_parallel_optimizer"


@binds
def initialize_parallel_optimizer(
    nxd_config: NxDConfig, optimizer_class: type[torch.optim.Optimizer], parameters: Iterable[Any], **defaults: Any
) -> NxDOptimizer:
    """Return ``optimizer_class(groups, **defaults)`` over this rank's shards of the parameters. Collective.

    Args:
        optimizer_class: a class of ``torch.optim``, or one like it.
        parameters: ``model.parameters()``, ``model.named_parameters()``, or groups of them as dictionaries.

    Raises:
        NotOfThisModel: parameters of another model.
        ArgumentMeansNothing: what is not an optimizer's class, or options that it does not take.
    """
    return NxDOptimizer(config_of(nxd_config, _CALL), optimizer_class, parameters, defaults)


class NxDOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose groups and state are those of the caller's class over this rank's shards.

    ``step`` finishes the gradients' sums over the ranks, clips them as ``optimizer_config`` says, and updates; a step
    with a gradient that is not finite leaves the weights as they are. ``grad_norm`` is the norm before clipping.
    """

    def __init__(
        self, nxd_config: NxDConfig, optimizer_class: Any, parameters: Iterable[Any], defaults: Mapping[str, Any]
    ) -> None:
        listed, requested, trained = list(parameters), list[dict[str, Any]](), list[torch.Tensor]()
        if nxd_config.model is None or (not listed and nxd_config.stages == 1):
            raise NotOfThisModel(call=_CALL, problem="there are no parameters")
        model = cast(NxDModel, nxd_config.model)
        # The caller's groups with the names of their parameters; what is frozen is left out.
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in listed if listed and isinstance(listed[0], Mapping) else [{"params": listed}]:
            is_group = isinstance(group, Mapping) and "params" in group
            expect(_CALL, "parameters", group, "a dictionary with 'params' in each place", when=is_group)
            params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
            params = [parameter[1] if isinstance(parameter, tuple) else parameter for parameter in params]
            foreign = sum(id(parameter) not in names for parameter in params)
            if foreign:
                raise NotOfThisModel(call=_CALL, problem=f"{foreign} of {len(params)} parameters are not")
            params = [parameter for parameter in params if parameter.requires_grad]
            trained += params
            requested.append({**group, "params": params, "names": [names[id(parameter)] for parameter in params]})

        def make(groups: Sequence[ParameterGroup], config: Any) -> torch.optim.Optimizer:
            """Return the optimizer over the caller's groups of the engine's shards."""
            shards = {name: p for group in groups for name, p in zip(group["names"], group["params"], strict=True)}
            of_shards = [{**group, "params": [shards[name] for name in group["names"]]} for group in requested]
            optimizer: torch.optim.Optimizer = optimizer_class(of_shards, **defaults)
            right = isinstance(optimizer, torch.optim.Optimizer)
            expect(_CALL, "optimizer_class", optimizer, "a torch.optim.Optimizer", when=right)
            return optimizer

        lr = defaults.get("lr", 0.0)
        check(_CALL, "lr", lr)
        settings, chosen = SimpleNamespace(lr=float(lr)), {id(parameter) for parameter in trained}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
        try:
            for parameter in others:  # the engine optimizes all that need gradients
                parameter.requires_grad_(False)
            core = nxd_config.engine.initialize_optimizer(model.parallel, make, settings, decay_norms=True)
            if not trained:  # the engine has not called it
                core.inner = make((), settings)
        except (TypeError, ValueError) as error:
            name = getattr(optimizer_class, "__name__", optimizer_class)
            raise refused(_CALL, "defaults", sorted(defaults), error=error, of=name) from error
        finally:
            for parameter in others:
                parameter.requires_grad_(True)
        super().__init__(core.inner.param_groups, core.inner.defaults)
        self.state = core.inner.state
        self.core = nxd_config.session.built_optimizer = core
        self.optimizer = core.inner
        """The optimizer of the caller's class."""
        clipping = nxd_config["optimizer_config"]
        self.max_norm = float(clipping["max_grad_norm"]) if clipping["grad_clipping"] else None
        self.nxd_config, self.trained = nxd_config, trained
        self.grad_norm: torch.Tensor | None = None
        self._finished: torch.Tensor | None = None
        """Norm of gradients that :meth:`finish` has finished since the last step."""
        nxd_config.optimizers = [*nxd_config.optimizers, self]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the gradients, clip them, and update. Collective. A closure is refused: it would run forward again."""
        if closure is not None:
            raise refused(_CALL, "closure", repr(closure))
        session = self.nxd_config.session
        self.core.begin_step(session.state.step)
        norm = self.finish(self.max_norm) if self._finished is None else self._finished
        self.core.reject_unless_finite(norm, norm)
        self.core.step()
        self._finished = None
        session.state.step += 1
        session.state.updates += 1

    def finish(self, max_norm: float | None) -> torch.Tensor:
        """Finish the gradients' sums, clip to ``max_norm``, and return the norm before. Collective."""
        self.grad_norm = self._finished = norm = self.core.clip_grad_norm(max_norm or None)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; a step has done so already."""
        self._finished = None
        for parameter in self.trained:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of the state by parameter name, and the groups' options."""
        return {"state": self.core.state_dict(), "param_groups": self.options()}

    def options(self) -> list[dict[str, Any]]:
        """Return what each group has besides its parameters."""
        tensors = ("params", "names", "shards")
        return [{key: value for key, value in group.items() if key not in tensors} for group in self.param_groups]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned in the same layout; :func:`load_checkpoint` loads in any."""
        self.core.load_state_dict(state_dict["state"])
        restore({"groups": state_dict["param_groups"]}, self, None)


class NeuronZero1Optimizer(NxDOptimizer):
    """An optimizer whose state is sharded over data parallel ranks.

    Args:
        params: parameters of the model that ``initialize_parallel_model`` returned last, or groups of them.
        grad_clipping, max_norm: decide instead of ``optimizer_config``.

    Raises:
        ArgumentMeansNothing: the model was not laid out for ZeRO-1.
    """

    @binds
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        grad_clipping: bool = True,
        max_norm: float | None = None,
        **defaults: Any,
    ) -> None:
        config = current_config()
        if config is None or config.model is None:
            raise NotOfThisModel(call=type(self).__name__, problem="there are no parameters")
        if not config["optimizer_config"]["zero_one_enabled"]:
            raise refused(type(self).__name__, "optimizer_config['zero_one_enabled']", False)
        super().__init__(config, optimizer_class, params, defaults)
        norm = self.max_norm if max_norm is None else max_norm
        self.max_norm = norm if grad_clipping else None

    @binds
    def save_sharded_state_dict(self, output_dir: str) -> None:
        """Save weights and state under the tag ``optim`` of ``output_dir``. Collective."""
        save_checkpoint(output_dir, "optim", self.nxd_config.model, self)

    @binds
    def load_sharded_state_dict(self, output_dir: str) -> None:
        """Load what :meth:`save_sharded_state_dict` saved, in any layout. Collective."""
        load_checkpoint(output_dir, "optim", self.nxd_config.model, self)


@binds
def clip_grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Finish the gradients' sums over the ranks, clip their global norm to ``max_norm``, and return the norm before.

    Collective. The optimizer's next step neither repeats the sums nor clips again.

    Raises:
        NotOfThisModel: some parameters only, or others.
    """
    passed = {id(parameter) for parameter in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
    config = current_config()
    for optimizer in () if config is None else config.optimizers:
        trained = {id(parameter) for parameter in optimizer.trained}
        if passed and passed <= trained:
            if passed != trained:
                raise NotOfThisModel(call="clip_grad_norm", problem="these are only some of the parameters")
            return cast(torch.Tensor, optimizer.finish(max_norm))
    raise NotOfThisModel(call="clip_grad_norm", problem="these are not the parameters of one optimizer")
