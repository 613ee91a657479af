"""Conformance kits that plugin authors subclass once. They need pytest, which shows the values of what they assert."""

import sys
from pkgutil import iter_modules

if "pytest" in sys.modules:  # else nothing here runs as a test
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))
