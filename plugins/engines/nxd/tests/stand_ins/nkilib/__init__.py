"""A stand-in; see :mod:`closed_packages`."""

from closed_packages import open_up

open_up(__name__)
