"""Which calls open files without :mod:`nxdt_core.system.regular_files`, and why each may.

Others can place links and pipes in a run's directory, a job's directory, a cache or a temporary directory. What is
opened there is opened by the helper; a call that is in none of the groups below fails the test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPER = "nxdt_core/system/regular_files.py"

METHODS = {
    *("open", "open_binary", "open_text", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "mkfifo"),
    *("savefig", "tofile", "fromfile", "memmap", "loadtxt", "savetxt", "save_file", "load_file", "safe_open", "FileIO"),
    *("copy2", "copyfile", "copytree", "copymode", "copystat", "move", "mkstemp", "mkdtemp", "NamedTemporaryFile"),
    *("TemporaryDirectory", "TemporaryFile", "FileHandler", "export_chrome_trace", "to_csv", "to_json", "to_parquet"),
    *("symlink_to", "hardlink_to", "save_pretrained", "link", "symlink", "mknod", "memory_map"),
}
OF_MODULES = {
    *(f"np.{name}" for name in ("load", "save", "savez", "savez_compressed")),
    *(f"torch.{name}" for name in ("load", "save")),
    *("shutil.copy", "from_file"),
}
FUNCTIONS = {"open", "safe_open", "save_file", "load_file", "mkdtemp", "mkstemp", "copyfile", "copy2", "open_memmap"}
LAST_PARTS = {name.rpartition(".")[2] for name in OF_MODULES}
CALLED = re.compile(rf"\b(?:{'|'.join(METHODS | LAST_PARTS | FUNCTIONS)})\s*\(")
"""What the text of a file has that is to be parsed."""

CORE, MEGATRON = "nxdt_core", "plugins/datasets/megatron_data/src/nxdt_plugin_megatron_data"
MIGRATE = "plugins/migration/nxd/src/nxdt_plugin_migrate/config"
NXD_CORE = "plugins/compat/nxd_core/src/nxdt_plugin_nxd_core"
ALLOWED = {
    "it opens no file by a name: an object of another kind, or a file that the helper has opened": {
        f"{CORE}/checkpoint/foreign.py: chosen.open(path)",
        f"{CORE}/cli/plot.py: figure.savefig(file, format=target.suffix.removeprefix('.'), dpi=120)",
        f"{CORE}/train/weights/reference.py: np.load(file, allow_pickle=False)",
        f"{CORE}/train/weights/reference.py: "
        "np.savez(file, weights=np.array(weights), values=computed.values, counts=computed.counts)",
        f"{MEGATRON}/preprocess.py: np.fromfile(file, '<i4')",
        f"{MIGRATE}/nxdt.py: document.move(path, OF_ENGINE[path])",
        f"{MIGRATE}/nxdt.py: document.move(path, key, _CHECKPOINT if key.startswith('checkpoint.') else '')",
        f"{MIGRATE}/nxdt.py: document.move(path, ALIGNMENT.get(path, section + path.removeprefix("
        "f'model_alignment_strategy.{part}')))",
        f"{MIGRATE}/nxdt.py: document.move(old, new)",
        f"{MIGRATE}/nemo.py: document.move(path, target)",
        f"{MIGRATE}/nxdt.py: "
        "document.move(path, target, 'NxD Training finds it by searching the whole file for its name')",
        f"{MIGRATE}/nemo.py: document.move(f'{{_LORA}}.{{old}}', f'adapter.{{new}}')",
        f"{MIGRATE}/nemo.py: document.move(theirs, ours)",
        f"{NXD_CORE}/rank_files.py: torch.save(_in_nxd_names(content, config), file)",
    },
    "installed files: packages, their metadata and data": {
        f"{CORE}/cli/explain.py: path.read_text(encoding='utf-8')",
        f"{CORE}/config/sources.py: self.path.read_text(encoding='utf-8')",
        f"{CORE}/data/chat/templates.py: _SHIPPED.joinpath(f'{{name}}{{_SUFFIX}}').read_text(encoding='utf-8')",
        f"{CORE}/kernel/registry.py: _FILE.read_text(encoding='utf-8')",
        f"{NXD_CORE}/arguments.py: files(__package__).joinpath(name).read_text('utf-8')",
        f"{CORE}/kernel/discovery.py: dist.read_text('entry_points.txt')",
        f"{CORE}/kernel/metadata.py: dist.read_text('METADATA')",
        f"{CORE}/kernel/metadata.py: dist.read_text('PKG-INFO')",
        f"{CORE}/kernel/lock.py: dist.read_text('RECORD')",
        f"{CORE}/kernel/lock.py: dist.read_text('direct_url.json')",
        f"{CORE}/cli/env.py: installed.read_text('RECORD')",
        f"{CORE}/cli/plugins.py: (source / 'pyproject.toml').read_text(encoding='utf-8')",
        f"{CORE}/kernel/lock.py: open(path, 'rb', buffering=0)",
        f"{CORE}/scaffold/repository.py: path.read_text(encoding='utf-8')",
        f"{CORE}/cli/env.py: module.read_bytes()",
    },
    "files of the operating system": {
        f"{CORE}/system/file_lock.py: (_PROC / 'sys/kernel/random/boot_id').read_text()",
        f"{CORE}/cli/app.py: open(os.devnull, 'w', encoding='utf-8')",
        f"{CORE}/cli/verb.py: os.open(os.devnull, os.O_WRONLY)",
        f"{CORE}/launch/supervision/heartbeat.py: (thread / 'children').read_text()",
        f"{CORE}/system/file_lock.py: MOUNTS.read_bytes()",
        f"{CORE}/system/progress.py: Path(f'/proc/{{pid}}/stat').read_text(encoding='utf-8', errors='replace')",
        f"{CORE}/distributed/device_operations.py: (system / file).read_text()",
        f"{CORE}/cli/env.py: file.read_text()",
    },
    "read only, and named by the configuration or on the command line: a link or `<(command)` is the user's wish": {
        f"{CORE}/checkpoint/signing.py: path.open('rb')",
        f"{CORE}/config/sources.py: path.read_text(encoding='utf-8-sig')",
        f"{CORE}/config/load.py: path.read_text(encoding='utf-8-sig')",
    },
    "read only, in a directory that is named; the line before checks that it is a file, and where a link leads": {
        f"{CORE}/data/tokenizers/files.py: path.read_bytes()",
        f"{CORE}/hf/reader.py: safe_open(path, framework='pt', device=HOST.type)",
        f"{CORE}/checkpoint/torch_file.py: torch.load(path, map_location=HOST, weights_only=True, mmap=True)",
        f"{CORE}/data/cache.py: path.open('rb')",
        f"{CORE}/data/files/compressed.py: path.open('rb')",
        f"{CORE}/data/files/tables.py: pyarrow.memory_map(str(path))",
        "plugins/adapters/lora/src/nxdt_plugin_lora/peft_files.py: safe_open(path, framework='pt', device=HOST.type)",
        f"{MEGATRON}/preprocess.py: path.open('rb')",
        f"{MEGATRON}/encoding.py: path.read_bytes()",
        f"{MEGATRON}/indexed_files.py: data.open('rb', buffering=0)",
        f"{MEGATRON}/indexed_files.py: np.memmap(index, dtype=np.uint8, mode='r')",
    },
    "in a directory with a new name that only this process has": {
        f"{CORE}/data/cache.py: path.open('wb')",
        f"{CORE}/data/cache.py: np.save(file, getattr(made, name))",
        f"{CORE}/data/cache.py: tempfile.mkdtemp(dir=place.parent, prefix=f'.{{place.name}}-')",
        f"{CORE}/engine/compile_cache.py: tempfile.TemporaryFile(dir=folder)",
    },
    "checked by `require_regular` or `require_plain_files` before; the library opens paths only": {
        f"{CORE}/data/cache.py: open_memmap(path, mode='r')",
        f"{CORE}/run/callbacks/profiler.py: trace.export_chrome_trace(target)",
    },
    "of the store of checkpoints: a directory, and a name for a file that it has made": {
        f"{CORE}/checkpoint/stores/local.py: os.link(temporary, path)",
        f"{CORE}/checkpoint/stores/local.py: os.open(folder, os.O_RDONLY | os.O_DIRECTORY)",
        f"{CORE}/checkpoint/stores/local.py: os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)",
    },
}


def calls(path: Path) -> Iterator[str]:
    """Yield each call in a module that opens a file by its name, and is not the helper's."""
    place, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text if CALLED.search(text) else "")):
        if isinstance(node, ast.Call) and opens(node) and not is_guarded(node):
            yield f"{place}: {ast.unparse(node)}"


def opens(node: ast.Call) -> bool:
    called = node.func
    if isinstance(called, ast.Name):
        return called.id in FUNCTIONS
    if not isinstance(called, ast.Attribute):
        return False
    return called.attr in METHODS or (called.attr in LAST_PARTS and ast.unparse(called) in OF_MODULES)


def is_guarded(node: ast.Call) -> bool:
    """Whether the helper opens the file, or the call makes it and fails where something has the name."""
    text = ast.unparse(node)
    exclusive = len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and "x" in str(node.args[1].value)
    return "opener=regular_opener" in text or text.startswith("open(open_regular(") or exclusive


@cache
def found() -> set[str]:
    sources = [*(ROOT / "nxdt_core").rglob("*.py"), *(ROOT / "plugins").glob("*/*/src/**/*.py")]
    assert len(sources) > 200  # the folders were found
    places = {path.relative_to(ROOT).as_posix(): path for path in sources}
    return {call for place, path in places.items() if place != HELPER for call in calls(path)}


def test_each_file_is_opened_by_the_helper_or_has_a_reason():
    allowed = {call for group in ALLOWED.values() for call in group}
    unknown = found() - allowed
    assert not unknown, f"open these with nxdt_core.system.regular_files, or say why not: {sorted(unknown)}"


def test_each_reason_is_for_a_call_that_exists():
    allowed = [call for group in ALLOWED.values() for call in group]
    assert len(allowed) == len(set(allowed))
    assert not set(allowed) - found()
