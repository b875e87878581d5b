"""Rules that hold for the whole tree, each with a twin that shows the checker finds a breach."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rankstep

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rankstep"

# A folder imports only from folders further down. `testing` stands lowest, and nobody here uses it.
LAYERS = (
    "cli",
    "explain",
    "check",
    "doctor",
    "trace",
    "launch",
    "checkpoint",
    "data",
    "parallel",
    "buckets",
    "collectives",
    "world",
    "testing",
)
# These import nothing of ours, and anyone may import them.
FREE = ("errors", "_version", "_callable", "trace.events")

AUTOGRAD_FILE = "parallel/hooks.py"
AUTOGRAD_WORDS = ("register_post_accumulate_grad_hook", "_execution_engine", "queue_callback")

COLLECTIVE_FOLDERS = ("collectives", "world", "launch", "testing")
COLLECTIVES = re.compile(
    r"torch\.distributed\.(distributed_c10d\.)?_?"
    r"(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|reduce|gather|scatter|barrier|monitored_barrier"
    r"|i?send|i?recv|batch_isend_irecv)(_(into_tensor|tensor|single|base|coalesced|object|object_list))*"
)

TORCH_DDP = re.compile(r"torch\.nn\.parallel\.(distributed\.)?DistributedDataParallel\b(.*)")
TORCH_DDP_USES = (".register", "._active_ddp_module")

# Written apart, so that this file does not hold what it forbids.
FORBIDDEN = tuple(
    "".join(parts)
    for parts in (
        ("/wo", "rk/"),
        ("/ro", "ot/"),
        ("/opt/", "pypi"),
        ("/opt/", "wheels"),
        ("index", "-url"),
        ("find", "-links"),
        ("pythonho", "sted"),
        ("pypi", ".org/simple"),
    )
)


def our_files(source):
    return [(path.relative_to(source), path) for path in sorted(source.rglob("*.py"))]


def module_of(relative):
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree, relative):
    """Yield (line, dotted name) of everything a file imports, wherever the import stands."""
    package = ["rankstep", *relative.parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def layer_breaches(source):
    """List the imports that do not point down."""
    return [
        f"{relative}:{line} imports {name}, {breach}"
        for relative, path in our_files(source)
        if relative != Path("__init__.py")
        for line, name in imported_modules(ast.parse(path.read_text("utf-8")), relative)
        if name.partition(".")[0] == "rankstep"
        and (breach := layer_breach(module_of(relative), name.partition(".")[2]))
    ]


def layer_breach(importer, imported):
    """Say what is wrong with one of our modules importing another, both named without the package, or return None."""
    if importer in FREE:
        return "but may import nothing of ours"
    if any(imported == free or imported.startswith(f"{free}.") for free in FREE):
        return None
    above, below = importer.partition(".")[0], imported.partition(".")[0]
    if above not in LAYERS or below not in LAYERS:
        return "which is in none of the known folders, or imported from outside them"
    if above == below:
        return None
    if below == "testing" or LAYERS.index(below) < LAYERS.index(above):
        return "which does not point down"
    return None


def names_used(tree):
    """Yield (line, full dotted name) of every imported thing where it is imported from or used."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                bound[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    inner = set()
    for node in ast.walk(tree):  # outer nodes come before the parts they are made of
        if isinstance(node, (ast.Attribute, ast.Name)) and node not in inner:
            chain, root = [], node
            while isinstance(root, ast.Attribute):
                chain.append(root.attr)
                root = root.value
                inner.add(root)
            if isinstance(root, ast.Name) and root.id in bound:
                yield node.lineno, ".".join([bound[root.id], *reversed(chain)])


def collective_breaches(source):
    """List the calls to torch's collectives outside the folders that own communication."""
    return [
        f"{relative}:{line} uses {name}"
        for relative, path in our_files(source)
        if relative.parts[0] not in COLLECTIVE_FOLDERS
        for line, name in names_used(ast.parse(path.read_text("utf-8")))
        if COLLECTIVES.fullmatch(name)
    ]


def torch_ddp_breaches(source):
    """List the uses of torch's own data parallelism, which this project must not be built on."""
    breaches = []
    for relative, path in our_files(source):
        text = path.read_text("utf-8")
        # One name for torch's class, through which the compiler is told which wrapper runs; see its uses there.
        text = text.replace("_known_to_compiler = torch.nn.parallel.DistributedDataParallel", "")
        if set(re.findall(r"_known_to_compiler(\.?\w*)", text)) - {"._active_ddp_module"}:
            breaches.append(f"{relative} uses torch's class for more than the compiler")
        for line, name in names_used(ast.parse(text)):
            found = TORCH_DDP.fullmatch(name)
            reducer = name.startswith("torch.") and "Reducer" in name.split(".")
            if reducer or (found and found[2] not in TORCH_DDP_USES):
                breaches.append(f"{relative}:{line} uses {name}")
    return breaches


def tree(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_imports_point_down():
    assert not layer_breaches(SOURCE)


def test_all_folders_have_a_layer():
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert folders <= set(LAYERS)


def test_the_layer_checker_finds_imports_that_do_not_point_down(tmp_path):
    source = tree(
        tmp_path,
        {
            "__init__.py": "from rankstep.testing import RankPool\n",
            "errors.py": "import rankstep.world\n",
            "trace/events.py": "",
            "world/env.py": "def late():\n    from rankstep.cli import main\n",
            "world/world.py": "from rankstep.errors import WorldError\nfrom rankstep.trace.events import X\n",
            "buckets/plan.py": "if TYPE_CHECKING:\n    from ..parallel import hooks\n",
            "buckets/bucket.py": "from . import plan\nfrom ..collectives import c10d\n",
            "cli/run.py": "from rankstep.testing.ranks import RankPool\n",
            "cli/main.py": "import_module('rankstep.testing')\nfrom rankstep import world\n",
            "cli/show.py": "from rankstep import DistributedDataParallel\n",
        },
    )
    assert [breach.partition(" imports")[0] for breach in layer_breaches(source)] == [
        "buckets/plan.py:2",
        "cli/main.py:1",
        "cli/run.py:1",
        "cli/show.py:1",
        "errors.py:1",
        "world/env.py:2",
    ]


def test_only_one_file_touches_autograd():
    mentions = [
        f"{relative} mentions {word}"
        for relative, path in our_files(SOURCE)
        for word in AUTOGRAD_WORDS
        if word in path.read_text("utf-8") and relative.as_posix() != AUTOGRAD_FILE
    ]
    assert not mentions


def test_only_the_communication_folders_call_collectives():
    assert not collective_breaches(SOURCE)


def test_the_collective_checker_finds_calls_under_any_name(tmp_path):
    source = tree(
        tmp_path,
        {
            "data/a.py": "import torch\ntorch.distributed.all_reduce(x)\n",
            "data/b.py": "import torch.distributed as dist\ndist.broadcast_object_list([x])\n",
            "data/c.py": "from torch.distributed import barrier as stop\nstop()\n",
            "data/d.py": "from torch import distributed\ndistributed._all_gather_base(x)\n",
            "data/fine.py": "import torch\ntorch.distributed.is_initialized()\ncomm.all_reduce(x)\n",
            "collectives/c10d.py": "import torch\ntorch.distributed.all_reduce(x)\n",
        },
    )
    assert [breach.partition(":")[0] for breach in collective_breaches(source)] == [
        "data/a.py",
        "data/b.py",
        "data/c.py",
        "data/d.py",
    ]


def test_nothing_is_built_on_torchs_own_wrapper():
    assert not torch_ddp_breaches(SOURCE)


def test_the_wrapper_checker_finds_calls_subclasses_and_the_reducer(tmp_path):
    source = tree(
        tmp_path,
        {
            "a.py": "import torch\ntorch.nn.parallel.DistributedDataParallel(model)\n",
            "b.py": "from torch.nn.parallel import DistributedDataParallel as D\nclass E(D): pass\n",
            "c.py": "import torch.distributed as dist\ndist.Reducer([])\n",
            "d.py": "from torch._C._distributed_c10d import Reducer\nReducer([])\n",
            "e.py": "from torch.nn.parallel.distributed import DistributedDataParallel\n"
            "wrap = DistributedDataParallel\n",
            "fine.py": '"""Not torch.nn.parallel.DistributedDataParallel."""\n'
            "from torch.nn.parallel import DistributedDataParallel as D\n"
            "D.register(Ours)\nD._active_ddp_module = None\nfrom rankstep.buckets import Reducer\n"
            "Reducer()\n",
        },
    )
    assert [breach.partition(":")[0] for breach in torch_ddp_breaches(source)] == [
        "a.py",
        "b.py",
        "c.py",
        "d.py",
        "e.py",
    ]


def test_the_public_names_are_sorted_and_exist():
    assert rankstep.__all__ == sorted(rankstep.__all__)
    assert not [name for name in rankstep.__all__ if not hasattr(rankstep, name)]


def test_the_public_names_are_documented():
    undocumented = [
        name
        for name in rankstep.__all__
        if callable(thing := getattr(rankstep, name))
        and not vars(thing).get("__doc__", thing.__doc__)
    ]
    assert not undocumented


def test_importing_has_no_side_effects():
    program = """
import os, sys, threading, torch, torch.distributed
environment, threads = dict(os.environ), threading.active_count()
import rankstep
assert dict(os.environ) == environment, "the environment changed"
assert threading.active_count() == threads, "a thread was started"
assert not torch.distributed.is_initialized(), "a process group was opened"
assert not torch.cuda.is_initialized(), "the GPU was initialized"
assert "rankstep.testing" not in sys.modules, "testing was imported"
assert "rich" not in sys.modules, "the screen library was imported"
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_files_can_be_read_in_one_sitting():
    long = {
        str(relative): lines
        for relative, path in our_files(SOURCE)
        if (lines := len(path.read_text("utf-8").splitlines())) >= 400
    }
    assert not long


def test_no_file_mentions_a_machine():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    listing = subprocess.run(
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    mentions = []
    for name in filter(None, listing.stdout.split("\0")):
        if not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_bytes().decode("utf-8", errors="replace")
        mentions += [f"{name} mentions {word}" for word in FORBIDDEN if word in text]
    assert not mentions


def test_changes_are_told():
    fragments = list((ROOT / "changelog.d").glob("*.*.md"))
    changelog = ROOT / "CHANGELOG.md"
    released = changelog.exists() and re.search(
        r"^## \d+\.\d+", changelog.read_text("utf-8"), re.MULTILINE
    )
    assert fragments or released
