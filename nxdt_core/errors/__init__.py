"""Every error that a user can cause: a code, what happened, what to do. Bugs are not in here.

The command line prints ``[code] what`` and ``do`` without a traceback and exits with status 2. Each code is a row,
``Family.define(code, cause, what, do)``, which is called with the values of its sentences; what code catches is a
class. An error carries its values as attributes; its sentences are built here and nowhere else. Codes are stable: ``K``
kernel and plugins, ``C`` configuration, ``D`` data and tokenizers, ``H`` the Hugging Face hub, ``M`` models and
weights, ``P`` parallelism and launch, ``S`` checkpoints and storage, ``T`` training runs.
"""

from nxdt_core.errors.base import NxdtError

__all__ = ["NxdtError"]
