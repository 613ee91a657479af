"""Weights & Biases, whose run ends with the training and not with the process."""

from __future__ import annotations

from pytorch_lightning.loggers import WandbLogger

__all__ = ["FinishedWandbLogger"]


class FinishedWandbLogger(WandbLogger):
    """Lightning's logger leaves the run open: a second training in one process would write into the first's."""

    def finalize(self, status: str) -> None:
        """Write what is left, and end the run with the status of the training."""
        super().finalize(status)
        self.experiment.finish(exit_code=int(status == "failed"))
