"""Names of the Hugging Face hub: ``hf:owner/name@revision`` is a model, ``hf:owner/name@revision/file`` is data.

A name means one commit, and files in the cache of ``huggingface_hub``, which is imported where a name is used. That
library takes the token, the endpoint, the cache and the offline mode from the environment. Resolving a name downloads
a model's configuration and tokenizer; :func:`complete` downloads weights and data. Code is never downloaded. What goes
wrong is a :class:`~nxdt_core.errors.hub.HubError`.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

from nxdt_core.errors import hub as rows
from nxdt_core.system.regular_files import read_text

__all__ = ["HUB_SCHEME", "begin", "complete", "create", "local_path", "name_of", "push", "resolve"]

HUB_SCHEME = "hf:"
_FORM = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@/\s]+))??(?:@(?P<commit>[0-9a-f]{40}))?(?:/(?P<file>\S+))?"
)
_WRITTEN = re.compile(r"hf:[^\s'\"]+@[0-9a-f]{40}[^\s'\"]*")
_SINGLE = "model.safetensors"
_DESCRIBING = (
    *("config.json", "generation_config.json", f"{_SINGLE}.index.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "chat_template.json"),
)
"""Files of a repository that describe a model and its tokenizer; none of them is code."""


_COMMITS: dict[tuple[str, str, str], str] = {}
"""Commit of each kind, repository and branch, which stays the same while a configuration is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A name of the hub, which is written ``hf:repo@revision@commit/file`` with the parts that it has."""

    repo: str
    """``owner/name``."""
    revision: str
    """Branch or tag; empty where a commit alone is named."""
    commit: str
    """The whole hash; empty before the name is resolved."""
    file: str
    """Path or pattern of files in a dataset's repository; empty for a model."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the name that a text is."""
        match = _FORM.fullmatch(text)
        if match is None or ".." in (match["file"] or "").split("/"):
            raise rows.HubNameMalformed(name=text)
        parts = match.groupdict(default="")
        return cls(**{**parts, "revision": unquote(parts["revision"]) or ("" if parts["commit"] else "main")})

    def __str__(self) -> str:
        revision = "" if self.revision == "main" and not self.commit else quote(self.revision, safe="")
        return HUB_SCHEME + "@".join(filter(None, [self.repo, revision, self.commit])) + f"/{self.file}".rstrip("/")

    @property
    def kind(self) -> str:
        """Return the kind of the repository in the library's words."""
        return "dataset" if self.file else "model"

    @property
    def path(self) -> Path:
        """Return the path of its files in the cache."""
        return self.snapshot / self.file

    @property
    def snapshot(self) -> Path:
        """Return the directory of its commit in the cache."""
        from huggingface_hub import constants

        folder = "--".join([f"{self.kind}s", *self.repo.split("/")])
        return Path(constants.HF_HUB_CACHE).expanduser().absolute() / folder / "snapshots" / self.commit


_LOCAL: dict[Path, HubName] = {}
"""Names that this process has resolved, by path."""


def begin(config: Path | None) -> None:
    """Forget what branches mean, but for those that a written configuration has with their commits."""
    _COMMITS.clear()
    with suppress(OSError, UnicodeDecodeError):
        written = "" if config is None else read_text(config)
        for name in map(HubName.parse, filter(_FORM.fullmatch, _WRITTEN.findall(written))):
            _COMMITS[name.kind, name.repo, name.revision] = name.commit


def resolve(text: str, *, as_data: bool = False) -> HubName:
    """Return a name with its commit, and download the files that describe a model; ``as_data`` takes no models."""
    name = HubName.parse(text)
    if as_data and not name.file:
        raise rows.HubNameMalformed(name=text, wanted="files")
    with _library(name) as hub:
        if not name.commit:
            key = (name.kind, name.repo, name.revision)
            if key not in _COMMITS:
                revision = hub.resolve_revision(name.repo, repo_type=name.kind, revision=name.revision)
                _COMMITS[key] = revision.resolved
            name = replace(name, commit=_COMMITS[key])
        files = _files(hub, name)
        wanted = _matching(name, files)
        if not wanted:
            fault = f"matches {name.file!r}" if name.file else "describes a model or a tokenizer"
            raise rows.HubNothingMatches(name=text, fault=fault, files=files)
        if not name.file:
            _download(hub, name, wanted)
        _LOCAL[name.path] = name
    return name


def local_path(text: str) -> str:
    """Return the path in the cache that a name of the hub means, once it is resolved; any other text as it is."""
    return str(resolve(text).path) if text.startswith(HUB_SCHEME) else text


def name_of(path: Path | str) -> str | None:
    """Return the name that this process has resolved to ``path``; None where there is none."""
    name = _LOCAL.get(Path(path))
    return None if name is None else str(name)


def complete(path: Path | str, *, download: bool = True) -> None:
    """Download the weights or data of the name that was resolved to ``path``; nothing for other paths.

    One process of a host downloads a file, and the others wait for it. Without ``download``, only the presence of
    weights is checked.
    """
    if (name := _LOCAL.get(Path(path))) is not None:
        with _library(name) as hub:
            files = _files(hub, name)
            wanted = _matching(name, files) if name.file else _weights(name, files)
            if not wanted:
                raise rows.HubNoSafetensors(name=str(replace(name, commit="")), files=files)
            if download:
                _download(hub, name, wanted)


def create(repo: str, *, private: bool) -> None:
    """Create the repository of a model where there is none."""
    name = HubName.parse(f"{HUB_SCHEME}{repo}")
    with _library(name) as hub:
        hub.create_repo(name.repo, private=private or None, exist_ok=True)


def push(repo: str, directory: str, message: str) -> str:
    """Upload a directory to the repository of a model, and return its name with the new commit."""
    name = HubName.parse(f"{HUB_SCHEME}{repo}")
    with _library(name) as hub:
        commit = hub.upload_folder(repo_id=name.repo, folder_path=directory, commit_message=message).oid
    return str(replace(name, revision="", commit=commit))


def _files(hub: Any, name: HubName) -> list[str]:
    """Return the files of a commit, as the cache knows them, else as the hub lists them, else those in the cache."""
    commit = {"repo_id": name.repo, "repo_type": name.kind, "revision": name.commit}
    try:
        return sorted(file.path for file in hub.get_cached_repo_tree(**commit))
    except hub.errors.CachedRepoTreeNotFoundError:
        present = [path for path in name.snapshot.rglob("*") if path.is_file()]
    try:
        return sorted(hub.list_repo_files(**commit))
    except (hub.errors.HTTPError, OSError):
        if not present:
            raise
        return sorted(path.relative_to(name.snapshot).as_posix() for path in present)


def _matching(name: HubName, files: Sequence[str]) -> list[str]:
    """Return the files that match a name's pattern, or that describe its model."""
    if name.file:
        return [file for file in files if _matches(file.split("/"), name.file.split("/"))]
    return [file for file in files if any(fnmatchcase(file, pattern) for pattern in _DESCRIBING)]


def _weights(name: HubName, files: Sequence[str]) -> list[str]:
    """Return the files of weights that the reader of Hugging Face directories opens: the single one, else those that
    the index names. A repository may have the weights once more, for other programs."""
    weights = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    if _SINGLE in weights:
        return [_SINGLE]
    index = name.snapshot / f"{_SINGLE}.index.json"
    text = read_text(index, follow=True) if index.is_file() else ""
    return [file for file in weights if f'"{file}"' in text] or weights


def _matches(parts: list[str], patterns: list[str]) -> bool:
    """Return whether a path matches as it does for :func:`glob.glob`, where ``**`` stands for any folders."""
    if not patterns or not parts:
        return not patterns and not parts
    if patterns[0] == "**":
        return _matches(parts, patterns[1:] or ["*"]) or _matches(parts[1:], patterns)
    return fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _download(hub: Any, name: HubName, files: Sequence[str]) -> None:
    missing = [file for file in files if not (name.snapshot / file).is_file()]
    if missing:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            hub.utils.disable_progress_bars()
        exact = [glob.escape(file) for file in missing]
        hub.snapshot_download(name.repo, repo_type=name.kind, revision=name.commit, allow_patterns=exact)
        if not all((name.snapshot / file).is_file() for file in missing):  # it may return what the cache has
            raise OSError("the hub does not answer")


@contextmanager
def _library(name: HubName) -> Iterator[Any]:
    """Yield the library, whose errors become errors of ours."""
    asked = str(replace(name, commit=""))
    try:
        hub: Any = import_module("huggingface_hub")
        from huggingface_hub import constants, errors, get_cached_repo_tree, resolve_revision  # noqa: F401
    except ImportError as error:
        raise rows.HubLibraryMissing(name=asked, reason=str(error)) from error
    shown = {"name": asked, "user": "this token" if hub.get_token() else "users without a token"}
    try:
        yield hub
    except errors.GatedRepoError as error:
        raise rows.HubGated(**shown, url=f"{constants.ENDPOINT}/{name.repo}") from error
    except errors.RepositoryNotFoundError as error:
        raise rows.HubNameNotFound(**shown, kind=name.kind) from error
    except errors.RevisionNotFoundError as error:
        revision = name.revision or name.commit
        raise rows.HubRevisionNotFound(name=f"{HUB_SCHEME}{name.repo}", revision=revision) from error
    except (hub.errors.HTTPError, errors.RevisionResolutionError, errors.HFValidationError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            raise rows.HubOffline(name=asked, cache=constants.HF_HUB_CACHE) from error
        response = getattr(error, "response", None)
        status = "" if response is None else f"it answers with status {response.status_code}"
        if response is not None and response.status_code in (401, 403):
            raise rows.HubTokenRefused(**shown, reason=response.headers.get("X-Error-Message", status)) from error
        cause = error.__cause__ or error
        reason = status or getattr(cause, "strerror", None) or str(cause).strip().partition("\n")[0].rstrip(".")
        raise rows.HubUnreachable(name=asked, endpoint=constants.ENDPOINT, reason=reason) from error
