"""The check before the first step that all ranks run the same code, plugins and configuration.

A difference would not fail by itself. It would train something that no user has configured, or hang in a collective.
"""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
from collections.abc import Mapping

import torch

from nxdt_core import __version__
from nxdt_core.config import ResolvedConfig
from nxdt_core.config.tree import dotted
from nxdt_core.errors.ranks import RanksDisagree
from nxdt_core.kernel.lock import digest_plugin
from nxdt_core.protocols.ranks import RankAgreement

_MAY_DIFFER = frozenset({"data.num_workers", "plugins.local"})
"""Keys that each host may set for itself: threads that read ahead, and the path of a plugin's file (the files are
compared)."""
_ABSENT = "absent"


def check_agreement(config: ResolvedConfig, ranks: RankAgreement) -> None:
    """Compare versions, plugins and configurations of several ranks; collective.

    Raises:
        RanksDisagree: on every rank, naming what differs and where.
    """
    facts = _facts(config, ranks.broadcast_object(secrets.token_hex()))
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    if len(set(ranks.all_gather_object(digest))) == 1:
        return
    by_rank: list[tuple[str, Mapping[str, str]]] = ranks.all_gather_object((ranks.host, facts))
    differences = []  # such as "data.seed is 1 on rank 0 (node1) and 2 on rank 1 (node2)"
    for name in sorted({name for _, facts_of_rank in by_rank for name in facts_of_rank}):
        where: dict[str, list[str]] = {}
        for rank, (host, facts_of_rank) in enumerate(by_rank):
            where.setdefault(facts_of_rank.get(name, _ABSENT), []).append(f"rank {rank} ({host})")
        values = []
        for value, named in where.items():
            more = f" and {len(named) - 2} more" if len(named) > 2 else ""
            values.append(f"{value} on {', '.join(named[:2])}{more}")
        if len(values) > 1:
            differences.append(f"{name} is {' and '.join(values)}")
    raise RanksDisagree(found=tuple(differences))


def _facts(config: ResolvedConfig, salt: str) -> dict[str, str]:
    """Return what must be equal: name of the fact → its value. For a value that must not be shown, it is a digest with
    ``salt``, which appears in no message."""
    facts = {
        "version of nxdt": __version__,
        "version of torch": torch.__version__,
        "version of Python": platform.python_version(),
    }
    for plugin in config.kernel.plugins:
        if plugin.state == "ok":
            facts[f"plugin {plugin.name}"] = f"{plugin.dist} {plugin.version} {digest_plugin(plugin)[:8]}".strip()
    for path, value in config.tree.leaves():
        if (key := dotted(path)) not in _MAY_DIFFER:
            facts[key] = json.dumps(config.tree.as_displayed(path))
            if config.tree.hides(path):
                digest = hashlib.sha256(f"{salt}{json.dumps(value)}".encode()).hexdigest()
                facts[key] += f" (value {digest[:8]})"
    return facts
