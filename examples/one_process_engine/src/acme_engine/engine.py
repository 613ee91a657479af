"""An engine of one process and one device: a plain module, plain tensors, and any torch optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.random.init import complete_init_rules, initialize
from nxdt_core.models.step_boundary import called_with_step
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.engine import ParallelEngine, RankInfo
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.optimizer import OptimizerFactory, ParameterGroup
from nxdt_core.protocols.parallel_model import ParallelModel, ParallelOptimizer, StepLoss
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.step_context import StepContext


class SoloModel(ParallelModel):
    """A module on one device. Its record declares no adapters, so none has added parameters."""

    def __init__(self, builder: ModelBuilder, precision: PrecisionPolicy, device: torch.device, seed: int) -> None:
        self.device, self.plan = device, builder.plan()
        with device:
            self.module = builder.build().to(getattr(torch, precision.parameters))
        for part in self.module.modules():
            getattr(part, "reset_buffers", lambda: None)()
        named = dict(self.named_parameters())
        initialize(named.items(), complete_init_rules(builder, named), seed)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters under their global names."""
        users = {user for _, user in self.plan.tied}  # a tied parameter goes by its owner's name
        named = self.module.named_parameters(remove_duplicate=False)
        return ((name, parameter) for name, parameter in named if name not in users)

    def run_train(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Forward and backward over the micro-batches of one global batch."""
        self.module.train()
        return self._run(micro_batches, objective, backward=True)

    @torch.no_grad()
    def run_eval(self, micro_batches: Sequence[Batch], objective: Objective) -> StepLoss:
        """Forward alone, in evaluation mode."""
        self.module.eval()
        return self._run(micro_batches, objective, backward=False)

    def _run(self, micro_batches: Sequence[Batch], objective: Objective, *, backward: bool) -> StepLoss:
        weights = sum(objective.weight(batch).reshape(-1) for batch in micro_batches).to(self.device)
        tokens = max(sum(float(batch.tokens()) for batch in micro_batches), 1)
        loss, metrics = torch.zeros((), device=self.device), {}

        def mean(sums: torch.Tensor) -> torch.Tensor:  # each term of a loss is divided by its own global weight
            return (sums.reshape(-1) / weights[: sums.numel()].clamp(min=1)).sum()

        for batch in (batch.to(self.device) for batch in micro_batches):
            step = StepContext(aux_loss_scale=1 / tokens, padding=batch.padding_mask())
            logits = called_with_step(self.module, step, batch.input_ids, batch.position_ids, batch.document_ids)
            output = called_with_step(objective, step, logits, batch)
            part = mean(output.loss_sum)
            if backward:
                part.backward()
            loss = loss + part.detach()
            for name, value in output.metrics.items():
                metrics[name] = metrics.get(name, 0) + mean(value.detach())
        return StepLoss(loss=loss, weight=weights[0], metrics=metrics)

    @torch.no_grad()
    def log_probs(self, micro_batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Log-probability of each label, 0 where there is none."""
        return [self._log_probs(batch.to(self.device)) for batch in micro_batches]

    def _log_probs(self, batch: Batch) -> torch.Tensor:
        logits = self.module.eval()(batch.input_ids, batch.position_ids, batch.document_ids)
        labels = batch.labels.clamp(min=0)[..., None]
        found = logits.float().log_softmax(-1).gather(-1, labels)[..., 0]
        return found.masked_fill(batch.labels == IGNORE_INDEX, 0.0)

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits of every token."""
        return self.module.eval()(input_ids.to(self.device))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and saved buffers."""
        users = {user for _, user in self.plan.tied}
        return {name: value for name, value in self.module.state_dict().items() if name not in users}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Copy weights in."""
        own = self.state_dict()
        missing, extra = [*(own.keys() - state.keys())], [*(state.keys() - own.keys())]
        shapes = [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
        if shapes or (strict and (missing or extra)):
            raise WeightsDoNotFit(missing=missing, extra=extra, shapes=shapes)
        for name in own.keys() & state.keys():
            own[name].copy_(state[name])

    def parameter_norm(self) -> torch.Tensor:
        """2-norm of all weights."""
        return torch.nn.utils.get_total_norm([parameter.detach() for _, parameter in self.named_parameters()])

    def local_modules(self) -> Sequence[torch.nn.Module]:
        """Return the whole module."""
        return [self.module]


class SoloOptimizer(ParallelOptimizer):
    """A torch optimizer whose state has the names of the parameters."""

    def __init__(self, model: SoloModel, inner: torch.optim.Optimizer) -> None:
        self.inner, self.skipped_steps, self._rejected = inner, 0, False
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._peaks = [group["lr"] for group in inner.param_groups]

    def set_lr_factor(self, factor: float) -> None:
        """Scale the learning rate of every group."""
        for group, peak in zip(self.inner.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Clip the gradients and return their norm before clipping."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._named.values() if p.grad is not None])
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._named.values(), max_norm, norm)
        return norm

    def reject_unless_finite(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Leave the weights alone at the next step unless both are finite."""
        self._rejected = not bool(torch.isfinite(loss + grad_norm))
        self.skipped_steps += self._rejected

    def step(self) -> None:
        """Update and clear the gradients."""
        if not self._rejected:
            self.inner.step()
        self._rejected = False
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors under the name of the parameter and their own."""
        states = ((name, self.inner.state.get(p, {})) for name, p in self._named.items())
        return {f"{name}/{key}": value for name, state in states for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of :meth:`state_dict`."""
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            self.inner.state[self._named[name]][key] = value.clone()


class SoloEngine(ParallelEngine):
    """The target of the record."""

    rank_info = RankInfo(mesh=MeshSizes().as_dict())

    def __init__(self, config: Any) -> None:
        wanted, found = config.run.trainer.accelerator, torch.accelerator.current_accelerator(check_available=True)
        self.device = torch.device("cpu") if wanted == "cpu" or found is None else found
        self.ranks = RankAgreement()

    def initialize_model(
        self,
        builder: ModelBuilder,
        *,
        precision: PrecisionPolicy,
        seed: int,
        adapters: Any = (),
        materialise: Any = True,
        frozen: Any = False,
    ) -> SoloModel:
        """Build the model on the device. No adapters come: the record does not declare them."""
        return SoloModel(builder, precision, self.device, seed)

    def initialize_optimizer(
        self, model: SoloModel, factory: OptimizerFactory, config: Any, *, decay_norms: bool
    ) -> SoloOptimizer:
        """Group the parameters by weight decay and build the optimizer."""
        exempt = model.plan.no_weight_decay if decay_norms else (*model.plan.no_weight_decay, *model.plan.norms)
        decay, groups = getattr(config, "weight_decay", 0.0), []
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for spared in (False, True):
            names = [name for name, _ in trained if matches_any(exempt, name) is spared]
            params = [dict(trained)[name] for name in names]
            groups += [ParameterGroup(params=params, names=names, lr=config.lr, weight_decay=0.0 if spared else decay)]
        return SoloOptimizer(model, factory([group for group in groups if group["params"]], config))
