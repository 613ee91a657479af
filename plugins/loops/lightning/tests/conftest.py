"""Small runs, as tests of the core have them."""

from tests.train.conftest import metric_rows, small_run

__all__ = ["metric_rows", "small_run"]
