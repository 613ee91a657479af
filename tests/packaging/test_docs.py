"""The site builds without a warning, and its generated pages know every hook, command and component."""

import csv
import html
import http.server
import json
import re
import shutil
import struct
import subprocess
import sys
import threading
import tomllib
from functools import partial

import pytest
import quickjs

from nxdt_core.cli.app import COMMANDS
from nxdt_core.config.schema import SLOTS, RunConfig, usable_class
from nxdt_core.config.section import keys_of
from nxdt_core.config.sources import list_recipes
from nxdt_core.kernel import Kernel
from nxdt_core.kernel.hookspecs import HOOKS as SPECIFICATIONS
from tests import processes
from tests.packaging.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import gallery
import public_api

HOOKS = [*SPECIFICATIONS]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    out = tmp_path_factory.mktemp("docs") / "site"
    mkdocs = "import gc; gc.disable(); from mkdocs.__main__ import cli; cli()"
    command = [sys.executable, "-c", mkdocs, "build", "--strict", "--site-dir", str(out)]
    done = processes.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_hook_has_a_section_with_an_example(site):
    page = (site / "reference/hooks/index.html").read_text()
    text = re.sub(r"<[^>]+>", "", page)
    for hook in HOOKS:
        assert f'id="{hook}"' in page
        assert f"def {hook}(" in text


def test_the_guide_for_authors_names_every_hook():
    guide = (ROOT / "docs/plugins.md").read_text()
    assert [hook for hook in HOOKS if f"`{hook}`" not in guide] == []


def test_a_guide_begins_with_a_command_that_does_the_task():
    """Or with code: at most a short paragraph is above it."""
    others = ["configuration", "data", "finetuning", "migration", "parallel", "plugins", "precision", "trainium"]
    guides = [*(ROOT / "docs/how-to").glob("*.md"), *(ROOT / "docs/kinds").glob("*.md")]
    guides += [ROOT / f"docs/{name}.md" for name in others]
    assert len(guides) > 40
    above = {path: re.split(r"^# .*", path.read_text(), flags=re.MULTILINE)[1].partition("\n```")[0] for path in guides}
    assert [path.name for path, text in above.items() if len(text.split()) > 50 or "\n## " in text] == []


@pytest.mark.parametrize(
    "page", ["architecture", "performance", "performance-methods", "efficiency", "../CONTRIBUTING"]
)
def test_files_that_a_page_of_the_source_names_exist(page):
    """By their path from the root or from ``nxdt_core``; a pattern names at least one."""
    named = set(re.findall(r"`((?:[\w*-]+/)+[\w*-]+\.(?:py|csv|txt|toml))`", (ROOT / f"docs/{page}.md").read_text()))
    assert len(named) > 4
    assert [name for name in named if not any([*ROOT.glob(name), *(ROOT / "nxdt_core").glob(name)])] == []


def test_classes_modules_and_folders_that_the_architecture_names_exist():
    page = (ROOT / "docs/architecture.md").read_text()
    core = ROOT / "nxdt_core"
    source = "".join(path.read_text() for path in core.rglob("*.py"))
    classes = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)[`.]", page))
    assert len(classes) > 4
    assert [name for name in classes if f"class {name}" not in source] == []
    engine = page.partition("| `nxdt_core/engine/` |")[2].partition("\n\n")[0]
    named = [core / "engine" / name for name in re.findall(r"`([\w.]+(?:/|\.py))`", engine)]
    packages = page.partition("| Package |")[2].partition("\n\n")[0]
    named += [core / name for name in re.findall(r"^\| `(\w+)`", packages, re.MULTILINE)]
    named += [core / name for name in re.findall(r"`((?:\w+/)+)`", page.partition("## Entry points")[0])]
    assert len(named) > 40
    assert [path for path in named if not path.exists() and not path.with_suffix(".py").exists()] == []


def test_decisions_are_on_the_page_of_their_subject_newest_first():
    index = (ROOT / "docs/decisions.md").read_text()
    pages = {path.name: path.read_text() for path in ROOT.glob("docs/decisions/*.md")}
    assert set(re.findall(r"\]\(decisions/([\w-]+\.md)\)", index)) == set(pages)
    assert re.findall(r"^## \d.*", index, re.MULTILINE) == [], "entries are on the pages of their subjects"
    for name, text in pages.items():
        dates = [title[:10] for title in re.findall(r"^## (.*)", text, re.MULTILINE)]
        assert dates == sorted(dates, reverse=True), name
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates), name


def test_every_benchmark_is_on_the_page_of_methods():
    page = (ROOT / "docs/performance-methods.md").read_text()
    scripts = [path for path in ROOT.glob("benchmarks/[!a]*/*.py") if '__name__ == "__main__"' in path.read_text()]
    assert len(scripts) > 15
    assert [path.name for path in scripts if f"`{path.relative_to(ROOT)}`" not in page] == []


def test_the_guide_for_authors_shows_every_file_of_the_example(site):
    pages = "".join((site / f"plugins/{name}/index.html").read_text() for name in ("complete", "models"))
    text = html.unescape(re.sub(r"<[^>]+>", "", pages + (site / "plugins/index.html").read_text()))
    for path in (ROOT / "examples/third_party").rglob("*.py"):
        assert path.read_text().strip() in text, path.name


def test_every_command_has_a_page_and_a_row(site):
    index = (site / "reference/cli/index.html").read_text()
    for name in COMMANDS:
        assert f'href="{name}/#nxdt-{name}"' in index
        assert f'id="nxdt-{name}"' in (site / f"reference/cli/{name}/index.html").read_text()


def test_every_key_of_the_core_has_an_anchor_on_the_page_of_its_section(site):
    def keys(cls, path):
        for name, key in keys_of(cls).items():
            where = f"{path}.{name}".removeprefix(".")
            yield from [where] if key.section is None else keys(key.section, where)

    found = list(keys(RunConfig, ""))
    assert len(found) > 130
    pages = {key.partition(".")[0]: site / f"reference/config/{key.partition('.')[0]}/index.html" for key in found}
    index = (site / "reference/yaml/index.html").read_text()
    texts = {top: page.read_text() if page.exists() else index for top, page in pages.items()}
    assert [key for key in found if f'id="{key}"' not in texts[key.partition(".")[0]]] == []


def test_every_component_has_its_keys_on_the_page_of_its_plugin(site):
    registry = Kernel.start().registry
    ours = [(slot, each) for slot in SLOTS for each in registry.all(slot.kind) if each.dist.startswith("nxdt-")]
    assert len(ours) > 40
    names = [tomllib.loads(p.read_text())["project"]["name"] for p in ROOT.glob("plugins/*/*/*.toml")]
    plugins = {name: name.removeprefix("nxdt-plugin-").replace("-", "_") for name in names}
    for slot, component in ours:
        name = component.record.name
        page, prefix = f"components/{slot.key}", f"{slot.key}-{name}"
        assert f'id="{name}"' in (site / f"reference/{page}/index.html").read_text()
        if component.dist in plugins:
            page, prefix = f"plugins/{plugins[component.dist]}", f"{slot.key}-{name}-{name}"
        text = (site / f"reference/{page}/index.html").read_text()
        cls = usable_class(component)
        keys = keys_of(cls) if cls else ()
        assert [key for key in keys if f'id="{prefix}-{key}"' not in text] == [], name


def test_every_error_has_its_own_code_and_a_section_with_a_fix(site):
    page = "".join(path.read_text() for path in site.glob("reference/errors/*/index.html"))
    files = [*ROOT.glob("nxdt_core/errors/*.py"), *ROOT.glob("plugins/*/*/src/**/errors.py")]
    written = r'^(?:\w+ = \w+\.define\(\s*|    code = )"(NXDT-\w+)"'
    codes = [code for path in files for code in re.findall(written, path.read_text(), re.MULTILINE)]
    assert len(codes) > 250
    assert [code for code in codes if codes.count(code) > 1] == []
    sections = dict(re.findall(r'<h2 id="(NXDT-\w+)">(.*?)(?=<h2 |</article>)', page, flags=re.DOTALL))
    assert [code for code in codes if code not in sections] == []
    texts = {code: html.unescape(re.sub(r"<[^>]+>", "", text)) for code, text in sections.items()}
    assert [code for code, text in texts.items() if not re.search(r"^Message: .+$", text, flags=re.MULTILINE)] == []
    assert [code for code, text in texts.items() if not re.search(r"^Fix: .+$", text, flags=re.MULTILINE)] == []
    assert [code for code, text in texts.items() if re.search(r"\{\w+[}!:]", text)] == [], "a raw template"
    index = (site / "reference/errors/index.html").read_text()
    causes = dict(re.findall(r'<td><a href="[A-Z]/#(NXDT-\w+)">\w+</a></td>\s*<td>(.{9,}?)</td>', index))
    assert sorted(causes) == sorted(sections)
    sources = [path for folder in ("nxdt_core", "plugins/*/*/src") for path in ROOT.glob(f"{folder}/**/*.py")]
    named = {code for path in sources for code in re.findall(r"NXDT-[A-Z]\d{3}(?!``)", path.read_text())}
    assert named - sections.keys() == set(), "a code that has no entry"


def test_the_support_matrix_has_what_models_declare(site):
    page = (site / "reference/support/index.html").read_text()
    text = page.partition('id="models"')[2].partition('id="engines"')[0]
    models = [each.record for each in Kernel.start().registry.all("model") if each.dist.startswith("nxdt-")]
    (row,) = re.findall(r"<tr>\s*<td><code>ep</code>: [^<]+</td>(.*?)</tr>", text, re.DOTALL)
    marks = ["✓" if "ep" in record.capabilities else "–" for record in models]
    assert re.findall(r">(✓|–)</td>", row) == marks
    (row,) = re.findall(r"<tr>\s*<td>TP, EP</td>(.*?)</tr>", page, re.DOTALL)
    assert re.findall(r">(✓|–)</td>", row) == marks, "all of them declare tp"


def test_every_kit_with_mutants_has_its_table(site):
    from tests.testing.test_objective_mutants import CAUGHT_BY

    page = (site / "reference/mutants/index.html").read_text()
    for kind in ("Adapter", "Callback", "Engine", "Model", "Objective", "Store", "Tokenizer"):
        assert re.search(rf"<h2[^>]*>{kind}", page)
    cells = " ".join(re.findall(r"<td>(.*?)</td>", page))
    for mutant in CAUGHT_BY.keys() - {"Right"}:
        assert re.sub(r"(?<!^)(?=[A-Z])", " ", mutant).lower() in cells


def test_variables_of_nxdt_in_the_environment_are_documented():
    page = (ROOT / "docs/reference/environment.md").read_text()
    sources = [*ROOT.glob("nxdt_core/**/*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")]
    read = {name for path in sources for name in re.findall(r"NXDT_[A-Z]+_[A-Z_]+", path.read_text())}
    assert [name for name in read - {"NXDT_SIGNING_KEY"} if name not in page] == [], "the key is an example of oc.env"


def test_every_public_name_has_a_section_in_the_python_api(site):
    text = "".join(path.read_text() for path in site.glob("reference/api/*/index.html"))
    places, names = set(re.findall(r'id="([^"]+)"', text)), set(re.findall(r"<td><code>(\w+)</code></td>", text))
    public = {f"{module}.{name}" for module, names in public_api.public_names().items() for name in names}
    described = {each for each in public if each in places or each.rpartition(".")[2] in names}
    assert public - described == set()


def test_the_gallery_has_every_recipe_with_a_plan_of_its_present_configuration(site):
    plans, runs = json.loads(gallery.PLANS.read_text()), json.loads(gallery.RUNS.read_text())
    recipes = {each.name: each for each in list_recipes(Kernel.start()) if each.path.is_relative_to(ROOT / "plugins")}
    assert plans.keys() == recipes.keys()
    old = [name for name, plan in plans.items() if plan["configuration"] != gallery.fingerprint(name)]
    assert old == [], "python scripts/gallery.py plans"
    for name, recipe in recipes.items():
        page = (site / f"reference/recipes/{recipe.plugin}/index.html").read_text()
        section = page.partition(f'<h2 id="{name}">')[2].partition("<h2 ")[0].partition("</article>")[0]
        assert "per rank, checkpoint" in section, name
        assert ("<svg" in section) is ("Not run by us" not in section) is (name in runs), name


def test_the_gallery_s_curves_are_those_of_whole_runs():
    plans, runs = json.loads(gallery.PLANS.read_text()), json.loads(gallery.RUNS.read_text())
    assert runs.keys() <= gallery.STEPS.keys()
    for name, run in runs.items():
        with (gallery.DATA / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert int(rows[-1]["step"]) == plans[name]["steps"], name
        assert f"nxdt train recipe:{name}" in run["commands"][-1]
        assert [row["step"] for row in rows if not (row["loss"] or row["validation_loss"])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny", "llama-tiny-lora", "llama3-8b-trn2"])
def test_a_plan_of_the_gallery_is_what_nxdt_plan_computes_now(name):
    assert gallery.facts(name) == json.loads(gallery.PLANS.read_text())[name], "python scripts/gallery.py plans"


QUERIES = {
    "install": "how-to/install/",
    "GPU": "how-to/several-gpus/",
    "docker": "how-to/install/#docker",
    "pip install": "how-to/install/",
    "mixtral": "reference/plugins/mixtral/",
    "slurm": "how-to/slurm/",
    "launch": "how-to/slurm/",
    "kubernetes": "how-to/slurm/",
    "resume training": "how-to/resume/",
    "resume on fewer nodes": "how-to/resume/#resume-on-fewer-or-more-nodes",
    "train on 2 GPUs": "how-to/several-gpus/",
    "own dataset class": "kinds/dataset/",
    "fine-tune on 24 GB": "how-to/one-gpu/",
    "which precision": "precision/",
    "learning rate": "how-to/learning-rate/",
    "chat template": "how-to/chat-template/",
    "S3": "how-to/s3/",
    "S3 credentials": "how-to/s3/#s3-credentials",
    "FSx": "how-to/fsx/",
    "write an optimizer": "kinds/optimizer/",
    "write a plugin": "plugins/",
    "out of memory": "how-to/out-of-memory/",
    "OOM": "how-to/out-of-memory/",
    "LoRA": "how-to/lora/",
    "evaluate": "how-to/evaluate/",
    "evaluation": "how-to/evaluate/",
    "NeMo config": "migration/",
    "axolotl": "how-to/coming-from/",
    "nxd core": "how-to/nxd-core/",
    "TensorBoard": "how-to/loggers/",
    "W&B": "how-to/loggers/",
    "wandb": "how-to/loggers/",
    "TensorBoard and W&B": "how-to/loggers/",
    "prometheus": "how-to/monitoring/#prometheus",
    "health file": "how-to/monitoring/#health-file",
    "vLLM": "how-to/serve/#vllm",
    "GGUF": "how-to/serve/#llamacpp-gguf",
    "quantise": "how-to/serve/#quantise-a-model",
    "quantize": "how-to/serve/#quantise-a-model",
    "error codes": "reference/errors/",
    "recipe gallery": "reference/recipes/",
    "trainium": "trainium/",
    "checkpoint": "checkpoints/",
    "plan search": "parallel/#find-the-fastest-layout-nxdt-plan-search",
    "support matrix": "reference/support/",
    "trainer.max_steps": "reference/config/trainer/",
    **{f"NXDT-{code}": f"reference/errors/{code[0]}/#NXDT-{code}" for code in ("S011", "C016", "D110", "D120", "T046")},
    "nxdt-k001": "reference/errors/K/#NXDT-K001",
    "S022": "reference/errors/S/#NXDT-S022",
}
"""Words that people search for → page and section that answers them."""
BROWSER = """
globalThis.self = globalThis;
globalThis.console = {warn() {}, log() {}};
globalThis.location = {href: "https://localhost/"};
let handle, answer;
globalThis.addEventListener = (_, handler) => { handle = handler; };
globalThis.postMessage = message => { answer = message.data; };
"""
"""What the program of the site that searches needs of a visitor's browser."""


@pytest.fixture(scope="module")
def search(site):
    """``search(*queries)``: by query, for each page that the site's search shows, its sections, best first."""
    (worker,) = (site / "assets/javascripts/workers").glob("*.js")
    browser = quickjs.Context()
    browser.set("index", (site / "search/search_index.json").read_text())

    def message(kind, data):
        browser.eval(f"handle({{data: {{type: {kind}, data: {data}}}}})")
        while browser.execute_pending_job():
            pass

    browser.eval(BROWSER + worker.read_text())
    message(0, "{...JSON.parse(index), options: {suggest: true}}")

    def run(*queries):
        found = {}
        for query in queries:
            message(2, json.dumps(query))
            found[query] = json.loads(
                browser.eval("JSON.stringify(answer.items.map(page => page.map(section => section.location)))")
            )
        return found

    return run


def shown(sections):
    """Return what the site lists of a page in its results: the page, and its best section if that is better."""
    return {sections[0].partition("#")[0], sections[0]}


def test_the_first_or_second_hit_of_a_search_is_the_page_and_section_that_answers_it(search):
    found = search(*QUERIES)
    hits = {query: [hit for page in pages[:2] for hit in shown(page)] for query, pages in found.items()}
    assert {query: hits[query] for query, right in QUERIES.items() if right not in hits[query]} == {}


def test_a_search_for_an_error_code_finds_what_names_it_and_its_entry_first(search):
    codes = ("NXDT-S011", "NXDT-D110", "NXDT-K001")
    found = search(*codes)
    assert [found[code][0][0] for code in codes] == [f"reference/errors/{code[5]}/#{code}" for code in codes]
    assert {code: len(pages) for code, pages in found.items() if len(pages) > 10} == {}


def test_the_search_leaves_out_pages_for_contributors(search):
    (pages,) = search("checkpoint").values()
    assert not {"decisions/", "defects/", "reference/schema/"} & {section.partition("#")[0] for (section, *_) in pages}


def test_pages_for_authors_of_tests_come_late_in_a_search_unless_they_are_meant(search):
    found = search("adapter", "dataset", "optimizer", "rank", "schedule", "tokenizer", "contract")
    testing = "reference/api/nxdt_testing"
    (meant,) = [found.pop("contract")]
    assert meant[0][0].startswith(testing)
    assert {query for query, pages in found.items() if any(page[0].startswith(testing) for page in pages[:5])} == set()


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VIEWED = (
    "",
    "precision/",
    "reference/config/trainer/",
    "reference/errors/",
    "parallel/",
    "reference/recipes/",
    "reference/recipes/llama/",
    "reference/api/nxdt_core.protocols.model/",
)
FRAMES = """<body style="margin:0"><script>
const pages = PAGES, widths = [390, 1400], found = {};
for (const page of pages) for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = "/nxdt/" + page;
  frame.onload = () => {
    const root = frame.contentDocument.documentElement;
    const broken = [...frame.contentDocument.images].filter(each => !each.naturalWidth).length;
    found[`${page} ${width}`] = [root.scrollWidth, root.clientWidth, broken];
    document.title = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script></body>"""
"""A window of headless Chromium is at least 500 pixels wide, frames are not."""


@pytest.fixture
def served(site, tmp_path):
    """Address of the site on this machine, and of a page with frames of it."""
    (tmp_path / "nxdt").symlink_to(site)
    (tmp_path / "frames.html").write_text(FRAMES.replace("PAGES", json.dumps(VIEWED)))
    (tmp_path / "favicon.ico").touch()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to look at the site")
def test_pages_fit_a_phone_and_a_desktop_and_log_no_error(served, tmp_path):
    browser = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1860,7400",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--virtual-time-budget=20000",
    ]
    picture = tmp_path / "picture.png"
    seen = [
        subprocess.run(
            [*browser, each, f"{served}/frames.html"], capture_output=True, text=True, timeout=120, check=True
        )
        for each in ("--dump-dom", f"--screenshot={picture}")
    ]
    measured = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", seen[0].stdout)[1]))
    assert len(measured) == 2 * len(VIEWED)
    assert {where: sizes for where, sizes in measured.items() if sizes[0] > sizes[1] or sizes[2]} == {}
    lines = [line for each in seen for line in each.stderr.splitlines() if "CONSOLE" in line]
    assert [line for line in lines if "api.github.com" not in line] == [], (
        "the theme asks there for stars, offline in vain"
    )
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1860, 7400)
