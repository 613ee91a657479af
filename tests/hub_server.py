"""A Hugging Face hub on 127.0.0.1 that answers the real client, as far as downloads and pushes ask it.

Repositories are in memory, each commit with its whole content. Weights and tables are LFS files: their addresses
redirect to storage, as the hub's do. For example::

    with HubServer() as hub:
        hub.commit("model", "owner/name", {"config.json": b"{}"})
        subprocess.run(["nxdt", …], env={**os.environ, **hub.environment(cache)})
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from tests import processes

__all__ = ["READER", "WRITER", "HubServer", "Repository", "run_commands"]

READER, WRITER = "hf_reader", "hf_writer"
"""Valid tokens: of a user who was not let into gated repositories, and of the owner."""
_LARGE = (".safetensors", ".parquet", ".bin")


@dataclass
class Repository:
    """A repository: its commits, oldest first, and its branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False


class HubServer:
    """The server; it answers within ``with``, on a port of its own."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.stored: dict[str, bytes] = {}
        """Content of LFS files, by SHA-256."""
        self.names: dict[str, str] = {}
        """Name of each of them that is committed."""
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and range of each request, in order."""
        self.read: list[str] = []
        """Name of the file of each answer with content."""
        self.breaks: dict[str, list[int]] = {}
        """By name of an LFS file: bytes after which the connection breaks, of each of its next downloads."""
        self.status: int | None = None
        """Status of all answers, such as 503; None: as usual."""
        self.after: Callable[[str], None] = lambda path: None
        """Called with the path of each request, once it is answered."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.storage = self.url.replace("127.0.0.1", "localhost")
        """Another host, whose redirects the client does not follow for a file's metadata."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, cache: Path, token: str | None = None) -> dict[str, str]:
        """Variables that lead the client to this server, with a cache of its own."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
        return {**variables, **({"HF_TOKEN": token} if token else {})}

    def commit(self, kind: str, name: str, files: Mapping[str, bytes], branch: str = "main", **options: bool) -> str:
        """Commit the whole content of a repository, which is made where there is none; return the hash."""
        repository = self.repositories.setdefault((kind, name), Repository(**options))
        sha = hashlib.sha1(f"{kind}{name}{len(repository.commits)}".encode()).hexdigest()
        repository.commits[sha], repository.refs[branch] = dict(files), sha
        for file, content in files.items():
            self.stored[_sha256(content)], self.names[_sha256(content)] = content, file
        return sha


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        path = urlsplit(self.path).path
        self._answer_to(path)
        self.hub.after(unquote(path))

    def _answer_to(self, path: str) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append((self.command, unquote(path), self.headers.get("Range", "")))
        if self.hub.status is not None:
            return self._answer(self.hub.status, b"")
        if path.startswith("/storage/"):
            return self._storage(path.rpartition("/")[2])
        if self.token not in (None, READER, WRITER):
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        if path == "/api/repos/create":
            return self._create()
        for pattern, answer in _ROUTES.items():
            if match := re.fullmatch(pattern, path):
                found = {name: unquote(part or "") for name, part in match.groupdict().items()}
                kind = "dataset" if found["kind"].startswith("dataset") else "model"
                repository = self.hub.repositories.get((kind, found["name"]))
                if repository is None or (repository.private and self.token != WRITER):
                    return self._refuse(404 if self.token else 401, "RepoNotFound", "Repository not found")
                sha = repository.refs.get(found.get("revision") or "main", found.get("revision") or "")
                if repository.commits and sha not in repository.commits:
                    return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {sha}")
                return answer(self, repository, sha, found)
        return self._refuse(404, "", f"no route for {path}")

    def _info(self, repository: Repository, sha: str, found: Mapping[str, str]) -> None:
        siblings = [{"rfilename": name} for name in repository.commits.get(sha, {})]
        self._json({"id": found["name"], "modelId": found["name"], "sha": sha, "siblings": siblings})

    def _tree(self, repository: Repository, sha: str, found: Mapping[str, str]) -> None:
        entries = []
        for name, content in repository.commits[sha].items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}
            if name.endswith(_LARGE):
                entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        self._json(entries)

    def _resolve(self, repository: Repository, sha: str, found: Mapping[str, str]) -> None:
        if repository.gated and self.token != WRITER:
            return self._refuse(403 if self.token else 401, "GatedRepo", "Access to this repository is restricted")
        content = repository.commits[sha].get(found["file"])
        if content is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": sha}
        if not found["file"].endswith(_LARGE):
            self.hub.read += [found["file"]] if self.command == "GET" else []
            return self._answer(200, content, {**headers, "ETag": f'"{_blob(content)}"'})
        large = {"X-Linked-Etag": f'"{_sha256(content)}"', "X-Linked-Size": str(len(content))}
        return self._answer(
            302, b"", {**headers, **large, "Location": f"{self.hub.storage}/storage/{_sha256(content)}"}
        )

    def _storage(self, digest: str) -> None:
        if self.command == "PUT":
            self.hub.stored[digest] = self.body
            return self._answer(200, b"")
        content, ranged = self.hub.stored[digest], self.headers.get("Range")
        begin = int(ranged.removeprefix("bytes=").partition("-")[0]) if ranged else 0
        headers = {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"} if ranged else {}
        breaks = self.hub.breaks.get(name := self.hub.names[digest])
        broken = breaks.pop(0) if breaks and self.command == "GET" else None
        self.hub.read += [name] if self.command == "GET" and broken is None else []
        return self._answer(206 if ranged else 200, content[begin:], headers, broken)

    def _create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'owner'}/{asked['name']}"
        if self.token != WRITER:
            return self._refuse(
                403 if self.token else 401, "", "You don't have the rights to create a model under the namespace"
            )
        if ("model", name) in self.hub.repositories:
            return self._refuse(409, "", "You already created this model repo")
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories["model", name] = Repository(private=private)
        return self._json({"url": f"{self.hub.url}/{name}"})

    def _preupload(self, repository: Repository, sha: str, found: Mapping[str, str]) -> None:
        names = [each["path"] for each in json.loads(self.body)["files"]]
        modes = ["lfs" if name.endswith(_LARGE) else "regular" for name in names]
        self._json(
            {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in zip(names, modes, strict=True)]}
        )

    def _batch(self, repository: Repository, sha: str, found: Mapping[str, str]) -> None:
        objects = json.loads(self.body)["objects"]
        for each in objects:
            each["actions"] = {"upload": {"href": f"{self.hub.url}/storage/{each['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repository: Repository, sha: str, found: Mapping[str, str]) -> None:
        files = dict(repository.commits.get(sha, {}))
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        new = self.hub.commit("model", found["name"], files)
        self._json({"commitUrl": f"{self.hub.url}/{found['name']}/commit/{new}", "commitOid": new, "hookOutput": ""})

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self._answer(status, json.dumps({"error": message}).encode(), headers)

    def _answer(
        self, status: int, content: bytes, headers: Mapping[str, str] | None = None, broken: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:broken])
        self.close_connection = self.close_connection or broken is not None


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


_API = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
_ROUTES = {
    _API + r"(?:/revision/(?P<revision>[^/]+))?": _Handler._info,
    _API + r"/tree/(?P<revision>[^/]+)": _Handler._tree,
    _API + r"/preupload/(?P<revision>[^/]+)": _Handler._preupload,
    _API + r"/commit/(?P<revision>[^/]+)": _Handler._commit,
    r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)": _Handler._resolve,
    r"/(?P<kind>)(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch": _Handler._batch,
}


_PROGRAM = """
import contextlib, io, json, os, sys
from nxdt_core.cli import main
for token, *words in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    os.environ.update({"HF_TOKEN": token} if token else {})
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = main(words)
    print(json.dumps([status, text.getvalue()]), file=sys.__stdout__)
print(json.dumps("huggingface_hub" in sys.modules))
"""


def run_commands(
    commands: Sequence[Sequence[str]], variables: Mapping[str, str], directory: Path, token: str = ""
) -> list[tuple[int, str]]:
    """Run commands of ``nxdt`` in one new process, since the client reads its environment when it is imported.

    A command begins with words; one that begins with ``token=`` has that token in place of ``token``. Returns status
    and output of each, and at last 0 or 1 for whether the client was imported.
    """
    given = [
        [words[0].removeprefix("token="), *words[1:]] if words[0].startswith("token=") else [token, *words]
        for words in commands
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = processes.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(given)],
        env={**kept, **variables, "COLUMNS": "80"},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *answers, imported = map(json.loads, done.stdout.splitlines()[-len(given) - 1 :])
    return [*((status, text) for status, text in answers), (int(imported), "")]
