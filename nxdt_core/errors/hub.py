"""Errors of the Hugging Face hub, of which models and data are named as ``hf:owner/name``: codes ``NXDT-H…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError


class HubError(NxdtError):
    """A name of the hub, such as ``hf:owner/name``, cannot be resolved, downloaded or pushed to."""


HubNameMalformed = HubError.define(
    "NXDT-H001",
    "A name of the Hugging Face hub that is not of its form, or a model in place of data.",
    "{name!r} is not the name of {wanted} on the hub.",
    "Write hf:owner/name or hf:owner/name@revision for a model, and hf:owner/name/*.parquet for files of a dataset. "
    "In a revision, write %2F for each slash.",
    defaults={"wanted": "a model or of files"},
)

HubLibraryMissing = HubError.define(
    "NXDT-H002",
    "The library of the Hugging Face hub is missing or too old.",
    "{name} is read with the library huggingface_hub, which cannot be used: {reason}.",
    "Install it: pip install 'huggingface_hub>=1.31'",
)

HubNameNotFound = HubError.define(
    "NXDT-H003",
    "A repository that the hub does not have, or does not show to this user.",
    "The hub has no {kind} {name}, or does not show it to {user}.",
    "Correct the name. For a private repository, set HF_TOKEN to a token that may read it. A name alone is a model; "
    "name the files of a dataset, as in hf:owner/name/*.parquet.",
)

HubGated = HubError.define(
    "NXDT-H004",
    "A repository whose owner wants to be asked first.",
    "{name} is gated, and the hub does not show its files to {user}.",
    "Ask for access at {url}, and set HF_TOKEN to a token of that account.",
)

HubTokenRefused = HubError.define(
    "NXDT-H005",
    "A token of the hub that is wrong, or that may not do what is asked.",
    "{name}: the hub refuses {user}: {reason}.",
    "Set HF_TOKEN to a valid token (https://huggingface.co/settings/tokens); to push, it needs the right to write.",
)

HubRevisionNotFound = HubError.define(
    "NXDT-H006",
    "A branch, a tag or a commit that a repository of the hub does not have.",
    "{name} has no revision {revision!r}.",
    "Name a branch, a tag or a whole commit of it, or leave out '@{revision}' to take its main branch.",
)

HubNothingMatches = HubError.define(
    "NXDT-H007",
    "A repository of the hub that lacks the files that are named or needed.",
    "{name}: no file of the repository {fault}. It has {files:list4}.",
    "Correct the name. * stands for any part of a file's name, and ** for any folders.",
)

HubNoSafetensors = HubError.define(
    "NXDT-H008",
    "A model of the hub without safetensors weights.",
    "{name} has no *.safetensors. It has {files:list4}.",
    "Name another repository, or a revision with safetensors; pickled weights (.bin, .pt) are never downloaded.",
)

HubOffline = HubError.define(
    "NXDT-H009",
    "A name of the hub that is not in the cache, without access to the hub.",
    "{name} is not completely in the cache {cache}, and HF_HUB_OFFLINE is set.",
    "Repeat the command once without HF_HUB_OFFLINE, or set HF_HOME to a cache that has it.",
)

HubUnreachable = HubError.define(
    "NXDT-H010",
    "A connection to the hub that fails or breaks.",
    "{name}: the exchange with {endpoint} failed: {reason}.",
    "Repeat the command: it downloads the files that are not complete yet. HF_ENDPOINT names a mirror.",
)
