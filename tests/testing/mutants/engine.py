"""Wrong engines, each the one of ``examples/one_process_engine`` with one mistake; a plugin file and a test file."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from nxdt_testing.engine_contract import EngineContract

from nxdt_core.api import EngineComponent, hookimpl
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.step_context import StepContext

_SOURCE = str(Path(__file__).parents[3] / "examples/one_process_engine/src")
if _SOURCE not in sys.path:
    sys.path.append(_SOURCE)

from acme_engine.engine import SoloEngine, SoloModel, SoloOptimizer  # noqa: E402


class Wrong(SoloEngine):
    """Builds the model and the optimizer of the mutant."""

    model, optimizer = SoloModel, SoloOptimizer

    def initialize_model(self, builder, *, precision, seed, **more):
        return self.model(builder, precision, self.device, seed)

    def initialize_optimizer(self, model, factory, config, *, decay_norms):
        right = super().initialize_optimizer(model, factory, config, decay_norms=decay_norms)
        return self.optimizer(model, right.inner)


class AveragesMicroBatches(Wrong):
    class model(SoloModel):
        def run_train(self, micro_batches, objective):
            parts = [super(AveragesMicroBatches.model, self).run_train([batch], objective) for batch in micro_batches]
            for _, parameter in self.named_parameters():
                parameter.grad /= len(parts)
            return type(parts[0])(
                loss=torch.stack([part.loss for part in parts]).mean(), weight=sum(part.weight for part in parts)
            )


class ForgetsAuxiliaryLosses(Wrong):
    class model(SoloModel):
        def _run(self, micro_batches, objective, *, backward):
            module = self.module

            def unscaled(*inputs):
                with at_step_boundary(StepContext(aux_loss_scale=0.0)):
                    return module(*inputs)

            self.module, kept = unscaled, module
            try:
                return super()._run(micro_batches, objective, backward=backward)
            finally:
                self.module = kept

        def run_train(self, micro_batches, objective):
            return self._run(micro_batches, objective, backward=True)


class DividesAllTermsByOneWeight(Wrong):
    class model(SoloModel):
        def run_eval(self, micro_batches, objective):
            class Flat(Objective):
                weight = staticmethod(objective.weight)

                def __call__(self, logits, batch):
                    output = objective(logits, batch)
                    return type(output)(loss_sum=output.loss_sum.sum(), weight=output.weight, metrics=output.metrics)

            return super().run_eval(micro_batches, Flat())


class ForgetsToClip(Wrong):
    class optimizer(SoloOptimizer):
        def clip_grad_norm(self, max_norm):
            return super().clip_grad_norm(None)


class MeasuresAfterClipping(Wrong):
    class optimizer(SoloOptimizer):
        def clip_grad_norm(self, max_norm):
            super().clip_grad_norm(max_norm)
            return super().clip_grad_norm(None)


class StepsOnNan(Wrong):
    class optimizer(SoloOptimizer):
        def reject_unless_finite(self, loss, grad_norm):
            super().reject_unless_finite(loss, grad_norm)
            self._rejected = False


class CountsNothing(Wrong):
    class optimizer(SoloOptimizer):
        def reject_unless_finite(self, loss, grad_norm):
            super().reject_unless_finite(loss, grad_norm)
            self.skipped_steps = 0


class KeepsGradients(Wrong):
    class optimizer(SoloOptimizer):
        def step(self):
            self.inner.step()


class KeepsItsRate(Wrong):
    class optimizer(SoloOptimizer):
        def set_lr_factor(self, factor):
            pass


class ForgetsItsState(Wrong):
    class optimizer(SoloOptimizer):
        def load_state_dict(self, state):
            pass


class LetsNormsDecay(Wrong):
    def initialize_optimizer(self, model, factory, config, *, decay_norms):
        return super().initialize_optimizer(model, factory, config, decay_norms=True)


class DrawsAlways(Wrong):
    def initialize_model(self, builder, *, precision, seed, **more):
        return super().initialize_model(builder, precision=precision, seed=7)


class LoadsWhatFits(Wrong):
    class model(SoloModel):
        def load_state_dict(self, state, *, strict=True):
            super().load_state_dict(state, strict=False)


class LosesItsGradients(Wrong):
    class model(SoloModel):
        def run_eval(self, micro_batches, objective):
            return self.run_train(micro_batches, objective)


class GivesLogitsOfTheLastToken(Wrong):
    class model(SoloModel):
        def forward(self, input_ids):
            return super().forward(input_ids)[:, -1:]


class TellsAllLogProbs(Wrong):
    class model(SoloModel):
        def _log_probs(self, batch: Batch):
            return self.module(batch.input_ids).log_softmax(-1).amax(-1)


class NamesItsWrapper(Wrong):
    class model(SoloModel):
        def state_dict(self):
            return {f"module.{name}": value for name, value in super().state_dict().items()}


class ShutsDownOnce(Wrong):
    def shutdown(self):
        del self.ranks


class IgnoresTheRanks(Wrong):
    """Declares tensor parallelism, and trains as rank 0 in each process."""


class IgnoresAdapters(Wrong):
    """Declares adapters, and leaves them out."""


class IgnoresGroups(Wrong):
    """Declares groups of parameters, and leaves them out."""


CLAIMS = {"IgnoresTheRanks": {"tp"}, "IgnoresAdapters": {"adapters"}, "IgnoresGroups": {"param_groups"}}
MUTANTS = {name: cls for name, cls in list(globals().items()) if isinstance(cls, type) and Wrong in cls.__bases__}


@hookimpl
def nxdt_engines():
    return [
        EngineComponent(
            name=name,
            target=f"{__name__}:{name}",
            capabilities=frozenset(CLAIMS.get(name, ())),
        )
        for name in ("Wrong", *MUTANTS)
    ]


for _name in ("Wrong", *MUTANTS):
    globals()[f"Test{_name}"] = type(f"Test{_name}", (EngineContract,), {"engine": _name, "plugins": (__file__,)})
