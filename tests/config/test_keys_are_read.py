"""Every key of the core and of its plugins is read somewhere, or says that it has no effect."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from nxdt_testing.unread_keys import names_read, unread_keys

from nxdt_core.api import KINDS
from nxdt_core.config.schema import RunConfig
from nxdt_core.kernel import Kernel
from tests.config.test_documentation import classes

ROOT = Path(__file__).parents[2]


@cache
def product():
    sources = [*ROOT.glob("nxdt_core/**/*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")]
    return names_read(sources, declarations=[*ROOT.glob("nxdt_core/config/*schema.py")])


def sections():
    """Return the class of every section, by its name."""
    registry = Kernel.start().registry
    offered = [component.load_config() for kind in KINDS for component in registry.all(kind.name)]
    roots = [RunConfig, *(cls for cls in offered if cls is not None and cls.__module__.startswith("nxdt_"))]
    found = (cls for root in roots for cls in classes(root))
    return {f"{cls.__module__}.{cls.__name__}": cls for cls in found}


@pytest.mark.parametrize("cls", sections().values(), ids=lambda cls: cls.__name__)
def test_every_key_is_read_or_says_that_it_has_no_effect(cls):
    assert unread_keys(cls, product()) == []


def test_a_name_that_no_code_reads_is_not_read():
    assert "a_key_of_no_code" not in product()
    assert "tensor_model_parallel_size" in product()
    assert "create_wandb_logger" in product(), "its name is composed"
