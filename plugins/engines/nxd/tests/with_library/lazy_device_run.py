"""A program: trains a model of the parity tests on the device of torch-xla and prints what it saw as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import test_parity as parity
import torch_xla.debug.metrics as metrics

from nxdt_core.distributed.devices import profile_of
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_optimizer, train_step

STEPS = 20


class Run:
    def __init__(self, model: str, seed: int) -> None:
        config = parity.run_of("nxd", model, 1, {}, {})
        self.engine, self.objective, self.state = build.engine(config), build.objective(config), TrainState()
        self.engine.start()
        precision = build.precision(config)
        self.model = self.engine.initialize_model(build.model_builder(config), precision=precision, seed=seed)
        self.optimizer = initialize_parallel_optimizer(config, self.engine, self.model)

    def steps(self, count: int) -> list[float]:
        done = [
            train_step(
                self.model, self.optimizer, parity.batches(), self.objective, lambda step: 1.0, self.state, max_norm=1.0
            )
            for _ in range(count)
        ]
        self.reads = (metrics.counter_value("aten::_local_scalar_dense") or 0) + (
            metrics.metric_data("TransferFromDeviceTime") or (0,)
        )[0]
        return [float(step.loss.loss) for step in done]


def main(model: str) -> None:
    whole = Run(model, seed=5)
    metrics.clear_all()
    losses = whole.steps(STEPS)
    compilations = (metrics.metric_data("CompileTime") or (0,))[0]
    begun = Run(model, seed=5)
    begun.steps(2)
    kept = [{name: value.cpu() for name, value in each.state_dict().items()} for each in (begun.model, begun.optimizer)]
    resumed = Run(model, seed=6)
    resumed.model.load_state_dict(kept[0])
    resumed.optimizer.load_state_dict(kept[1])
    found = {
        "device": str(whole.engine.device),
        "losses": losses,
        "compilations": compilations,
        "values read in the steps": whole.reads,
        "fixed shapes": profile_of(whole.engine.device).static_shapes,
        "resumed": resumed.steps(2),
        "expected": parity.train("torch", model, 1, {}, {}).losses,
    }
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
