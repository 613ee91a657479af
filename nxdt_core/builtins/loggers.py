"""Built-in loggers: stock Lightning loggers, placed in the run's directory."""

from __future__ import annotations

from pathlib import Path

from pytorch_lightning.loggers import Logger, TensorBoardLogger

__all__ = ["tensorboard"]


def tensorboard(config: object, run_dir: Path) -> Logger:
    """Event files directly in ``run_dir``; the writer is created at the first logged step."""
    return _EventFiles(save_dir=str(run_dir), name="", version="")


class _EventFiles(TensorBoardLogger):
    def save(self) -> None:
        """Flush; no file of hyper-parameters, since ``config.yaml`` lies beside."""
        self.experiment.flush()
